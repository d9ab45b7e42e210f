"""The order in which operator types are listed."""

from __future__ import annotations

from amo_dist.config import OPERATOR_TYPES, sort_operator_types


def test_declared_types_come_first_and_the_others_alphabetically() -> None:
    mixed = ["z", "mlp_down", "attn_v", "Expert", "attn_q", "z"]
    assert sort_operator_types(mixed) == ("attn_q", "attn_v", "mlp_down", "Expert", "z")
    assert sort_operator_types(reversed(OPERATOR_TYPES)) == OPERATOR_TYPES


def test_groups_of_a_type_stand_where_the_type_does() -> None:
    mixed = ["zeta", "mlp_up/deep", "attn_q", "attn_k/shallow", "attn_k/deep", "mlp_gate"]
    assert sort_operator_types(mixed) == (
        *("attn_q", "attn_k/deep", "attn_k/shallow", "mlp_gate", "mlp_up/deep", "zeta"),
    )
