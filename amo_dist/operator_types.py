"""The operator types of a dense transformer block, and the order in which types are listed."""

from __future__ import annotations

from collections.abc import Iterable

OPERATOR_TYPES = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_up", "mlp_down")
"""The seven types of a dense decoder, in their declared order."""


def sort_operator_types(operator_types: Iterable[str]) -> tuple[str, ...]:
    """Put operator types in the order in which plans and reports list them and break ties.

    Args:
        operator_types: Any names; duplicates are dropped.

    Returns:
        Those of ``OPERATOR_TYPES`` in their declared order, then the others alphabetically. Groups
        of a type, ``attn_q/deep``, stand where the type does, alphabetically too.
    """
    order = {name: index for index, name in enumerate(OPERATOR_TYPES)}
    return tuple(
        sorted(
            set(operator_types),
            key=lambda name: (order.get(name.partition("/")[0], len(order)), name),
        )
    )
