"""The models of eight libraries, of which `tests/census.py` records what becomes of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from amo_dist.operators.roles import UNKNOWN
from tests import census, skeletons
from tests.examples import fill

CENSUS: dict[str, dict[str, dict[str, Any]]] = json.loads(census.CENSUS.read_text())
FAMILIES: dict[str, dict[str, dict[str, str]]] = json.loads(census.FAMILIES.read_text())
SKELETONS: dict[str, dict[str, Any]] = json.loads(census.SKELETONS.read_text())
TRANSFORMERS = next(release for release in FAMILIES if release.startswith("transformers"))
# One of each kind: separate and packed projections, GPT-2's stores, experts in lists and in stacks,
# latent and linear attention, an encoder, vision.
SAMPLE = (
    *("LlamaForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM"),
    *("GptOssForCausalLM", "DeepseekV2ForCausalLM", "Qwen3NextForCausalLM", "Mamba2ForCausalLM"),
    *("BertForMaskedLM", "T5ForConditionalGeneration", "SwinForImageClassification", "CLIPModel"),
)
# Why a tensor of a block goes to AdamW.
REASONS = {
    *("adapter", "bias", "complex", "embedding", "head", "one row per head"),
    *("relative positions", "router", "state-space table", "table", "1-D"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.slow])
        for name in FAMILIES[TRANSFORMERS]
    ],
)
def test_every_parameter_is_what_the_record_says(name: str) -> None:
    builds = dict(census.of_transformers())
    try:
        with torch.device("meta"):
            model = builds[name]()
    except ImportError as error:  # a vision tower of timm
        pytest.skip(str(error).strip())
    places = census.decided(model)
    assert census.compress(places) == FAMILIES[TRANSFORMERS][name]
    assert json.loads(json.dumps(census.row(places))) == CENSUS[TRANSFORMERS][name]


@pytest.mark.parametrize(
    ("release", "name"), [(r, name) for r, models in SKELETONS.items() for name in models]
)
def test_models_of_other_libraries_by_their_skeletons(release: str, name: str) -> None:
    places = census.decided(skeletons.rebuild(SKELETONS[release][name]))
    assert census.compress(places) == FAMILIES[release][name]
    assert json.loads(json.dumps(census.row(places))) == CENSUS[release][name]


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen3NextForCausalLM"])
def test_a_skeleton_is_seen_as_its_model(name: str) -> None:
    with torch.device("meta"):
        model = dict(census.of_transformers())[name]()
    twin = skeletons.rebuild(json.loads(json.dumps(skeletons.record(model))))
    assert census.compress(census.decided(twin)) == census.compress(census.decided(model))


def test_the_census_reaches_its_aims() -> None:
    rows = [row for models in CENSUS.values() for row in models.values() if "blocks" in row]
    assert len(rows) > 850
    refused = [row for row in rows if row.get(UNKNOWN)]
    assert len(refused) < 0.05 * len(rows)
    low = [row for row in rows if row["blocks"] < 0.9]
    assert len(low) < 0.05 * len(rows)
    reasons = {reason for row in rows for reason in row.get("adamw", {})}
    assert {reason for reason in reasons if not re.fullmatch(r"[1-5]-D", reason)} <= REASONS


def test_the_page_shows_the_census() -> None:
    assert census.PAGE.read_text() == fill(
        census.PAGE.read_text(), "families", census.table(CENSUS)
    ), "run `python -m tests.census` to rewrite the table of docs/families.md"


# The record is a snapshot of what the rules say. What follows knows nothing of the rules: names
# that have one meaning in all of these libraries.
ADAMW_PARTS = re.compile(
    r"(?x) (^|\.) ( \w*bias | lm_head | (\w+_)?head | classifier | cls | predictions | \w*router\w*"
    r" | \w*relative_position\w*(?<!_embedding) | rel_pos_[hw] | \w*position_bias_mlp | wte | wpe"
    r" | \w*(tok|token|word|(?<!relative_)position)_?embed\w* | \w*pos_embed | shared_expert_gate"
    r" | A_log | D | (cls|mask|query|iou)_tokens? ) (\.|$)"
)


def test_what_is_no_matrix_of_a_block_goes_to_adamw() -> None:
    wrong = [
        (family, name, line)
        for families in FAMILIES.values()
        for family, lines in families.items()
        for name, line in census.expand(lines).items()
        if not line.partition(" ")[2].startswith(("adamw", "unknown")) and ADAMW_PARTS.search(name)
    ]
    assert wrong == []
