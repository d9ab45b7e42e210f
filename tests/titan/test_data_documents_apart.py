"""Documents of a batch and the model: attention that ends with a document, and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchtitan_ext.config import checks, settings
from torchtitan_ext.data.loader import document_positions
from torchtitan_ext.data.tokenizers import BYTE_VOCAB_SIZE
from torchtitan_ext.plugin import patches

EOS = BYTE_VOCAB_SIZE - 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_a_document_sees_others_with_sdpa_alone(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMO_DEVICE", "cpu")
    patches.install()
    arguments = [f"--model.name={name}", "--model.flavor=tiny", f"--model.attention={attention}"]
    data = ["--dataloader.dataset=stdlib", "--tokenizer.kind=byte", "--training.seq_len=128"]
    config = settings.parse([*arguments, *data, "--optimizer.name=Muon"])
    config = checks.complete(config)
    assert config.model_spec is not None
    assert config.dataloader.positions == (attention == "flex")
    config.model_spec.model.update_from_config(config=config)
    torch.manual_seed(0)
    model: Any = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)

    def logits(tokens: torch.Tensor) -> Any:
        if attention == "sdpa":
            return model(tokens)
        positions = document_positions(tokens, EOS)
        masks = model.get_attention_masks(positions=positions)
        return model(tokens, positions=positions, attention_masks=masks)

    tokens = torch.randint(EOS, (1, 128))
    tokens[0, 60] = EOS
    other = tokens.clone()
    other[0, :60] = torch.randint(EOS, (60,))
    # Without a compiler: attention is the same, and slower.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        change = (logits(tokens) - logits(other))[0].abs().amax(dim=1)
    assert change[:61].min() > 0
    assert (change[61:].max() > 0) == (attention == "sdpa")
