"""Models of a config: their first weights and attention, and torchtitan on CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal, cast

import pytest
import torch
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder

from torchtitan_ext.plugin import models, patches
from torchtitan_ext.plugin.activations import Activations
from torchtitan_ext.plugin.parallelize import parallelize


def build(name: str, flavor: str, *, fuse_qkv: bool = False) -> Decoder:
    spec = models.spec(models.Model(name=name, flavor=flavor, fuse_qkv=fuse_qkv))
    return cast(Decoder, spec.model.build())


def start(model: Decoder, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return dict(model.state_dict())


def test_first_weights_are_those_of_earlier_runs() -> None:
    # Drawn from names that torchtitan had before 0.3.0; a change would end all comparisons.
    found = start(build("llama3", "tiny"), seed=42)
    for name, expected in {
        "layers.1.attention.qkv_linear.wk.weight": [0.0260078069, 0.0215195976, 0.0084796632],
        "lm_head.weight": [0.0062356102, 0.0019128791, 0.0041444905],
    }.items():
        assert found[name][0, :3].tolist() == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_a_fused_projection_starts_as_three(name: str) -> None:
    apart, fused = build(name, "tiny"), build(name, "tiny", fuse_qkv=True)
    expected, found = start(apart), start(fused)
    assert "layers.0.attention.qkv_linear.wqkv.weight" in dict(fused.named_parameters())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(fused(tokens), apart(tokens))


@pytest.mark.parametrize("flavor", ["tiny", "debugmodel"])
def test_sdpa_is_in_every_block(flavor: str) -> None:
    config = cast(Decoder.Config, models.spec(models.Model(name="qwen3", flavor=flavor)).model)
    inner = [layer.attention.inner_attention for layer in config.layers]
    assert all(isinstance(one, ScaledDotProductAttention.Config) for one in inner)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "llama5"}, "model.name: found 'llama5', expected one of deepseek_v3, "),
        ({"flavor": "9B"}, "model.flavor: found '9B', expected one of .*tiny.*, 8B, "),
        ({"name": "gpt_oss"}, "model.attention: found 'sdpa', expected 'flex' or 'varlen' for gpt"),
    ],
)
def test_mistakes(values: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.spec(models.Model(**values))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
@pytest.mark.parametrize("attention", ["flex", "varlen"])
def test_attention_that_does_not_train_on_a_cpu(attention: Literal["flex", "varlen"]) -> None:
    patches.install()
    spec = models.spec(models.Model(flavor="tiny", attention=attention))
    with torch.device("meta"):
        model = spec.model.build()
    with pytest.raises(ValueError, match=r"model.attention: found .*, expected 'sdpa' on a CPU"):
        parallelize(lambda model: model, model)


@pytest.mark.parametrize(("mode", "wraps"), [("none", False), ("full", True), ("selective", True)])
def test_blocks_whose_activations_are_computed_again(
    mode: Literal["none", "full", "selective"], wraps: bool
) -> None:
    with torch.device("meta"):
        model = build("llama3", "quickstart")
    Activations.Config(mode=mode).build(dump_folder="").apply(model)
    names = [name for name, _ in model.named_modules() if name.endswith("_wrapped_module")]
    expected = [f"layers.{block}._checkpoint_wrapped_module" for block in range(4)]
    assert names == (expected if wraps else [])


def test_importing_the_package_alone_is_cheap() -> None:
    program = (
        "import sys, torchtitan_ext; print(any('torch' in m.split('.')[:1] for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "flavor", "sizes", "expected"),
    [
        (
            "qwen3",
            "tiny",
            {"layers": 3, "heads": 6, "head_dim": 32, "kv_heads": 3},
            (192, 96, 3, 320),
        ),
        ("llama3", "tiny", {"dim": 96, "heads": 4, "kv_heads": 4}, (96, 96, 2, 320)),
        ("llama3", "debugmodel", {"layers": 1, "vocab_size": 512}, (256, 256, 1, 512)),
        ("qwen3", "0.6B", {"layers": 2}, (2048, 1024, 2, 151936)),
    ],
)
def test_sizes_of_a_config_take_the_place_of_the_flavors(
    name: str, flavor: str, sizes: dict[str, int], expected: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model: Any = models.spec(models.Model(name=name, flavor=flavor, **sizes)).model.build()  # type: ignore[arg-type]
    query, key, num_layers, vocab_size = expected
    attention = model.layers["0"].attention.qkv_linear
    assert attention.wq.weight.shape[0] == query
    assert attention.wk.weight.shape[0] == key
    assert len(model.layers) == num_layers
    assert model.tok_embeddings.weight.shape[0] == vocab_size
    # The sizes that are not set stay.
    with torch.device("meta"):
        stock: Any = models.spec(models.Model(name=name, flavor=flavor)).model.build()
    if "dim" not in sizes:
        old, new = (one.layers["0"].feed_forward.w1.weight.shape for one in (stock, model))
        assert old == new


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": -1}, r"model\.layers: found -1, expected an integer"),
        ({"heads": 5}, r"model\.q_ratio: .* 5 heads"),
        ({"heads": 16}, r"model\.head_dim: found 3, expected an even number"),
        ({"heads": 3}, r"model\.kv_heads: found 2, expected a divisor of 3"),
        (
            {"head_dim": 16},
            r"model\.head_dim: found 16, expected dim / heads = 8 or none for llama3",
        ),
        ({"vocab_size": -5}, r"model\.vocab_size: found -5"),
        (
            {"name": "gpt_oss", "flavor": "debugmodel", "dim": 64},
            "model.dim: found 64 with model.na",
        ),
    ],
)
def test_sizes_that_cannot_be_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.spec(
            models.Model(**{"name": "llama3", "flavor": "tiny", "attention": "flex", **values})
        )
