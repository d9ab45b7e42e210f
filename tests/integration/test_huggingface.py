"""Trainers that make the optimizer by its name; `tests.test_recipes` passes one that is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from amo_dist import Muon

pytestmark = pytest.mark.slow

# Grouped-query attention, and no width divides another.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))


RATE = {"lr": 1e-2}
LAST = 4


def arguments(folder: Path, steps: int) -> dict[str, Any]:
    """Of a short run that saves in its middle."""
    how = {"use_cpu": True, "report_to": "none", "lr_scheduler_type": "constant"}
    return how | {"output_dir": folder, "max_steps": steps, "save_steps": 2, "logging_steps": 1}


def trained(trainer: Any, resume: bool = False) -> tuple[list[float], list[Tensor]]:
    """Losses of all steps, and the weights."""
    trainer.train(resume_from_checkpoint=resume)
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return found, [weight.detach() for weight in trainer.model.parameters()]


def assert_same_run(run: tuple[list[float], list[Tensor]], expected: Any) -> None:
    assert run[0] == expected[0]
    assert len(run[0]) == LAST
    assert run[0][-1] < run[0][0] - 0.2
    assert all(map(torch.equal, run[1], expected[1]))


def test_trainer_makes_the_optimizer(tmp_path: Path) -> None:
    """As one that the caller makes; before version 5.2 transformers does not pass the model."""
    tokens = (torch.arange(8)[:, None] + torch.arange(16)) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def make(folder: str, door: str, steps: int = LAST) -> Any:
        model = make_model()
        doors: dict[str, Any] = {
            "optimizers": (Muon(model, **RATE), None),
            "for_trainer": (Muon.for_trainer, RATE),
            "before 5.2": (Muon, {"model": model, **RATE}),
        }
        keyword = door if door == "optimizers" else "optimizer_cls_and_kwargs"
        args = transformers.TrainingArguments(**arguments(tmp_path / folder, steps))
        return transformers.Trainer(model, args, train_dataset=data, **{keyword: doors[door]})

    expected = trained(make("made", "optimizers"))
    for door in ("for_trainer", "before 5.2"):
        assert_same_run(trained(make(door, door)), expected)
    trained(make("resumed", "for_trainer", 2))
    assert_same_run(trained(make("resumed", "for_trainer"), resume=True), expected)


# An option of transformers that TRL still sets by its old name.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_trl_makes_the_optimizer_of_a_model_by_its_name(tmp_path: Path) -> None:
    """`optimizers` would need the model, which TRL loads."""
    trl = pytest.importorskip("trl")
    words = [f"w{number}" for number in range(60)] + ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizers = pytest.importorskip("tokenizers")
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=split, **special)
    for part in (make_model(), tokenizer):
        part.save_pretrained(tmp_path / "model")
    texts = [{"text": " ".join(words[row : row + 16])} for row in range(32)]
    data = pytest.importorskip("datasets").Dataset.from_list(texts)

    def make(folder: str, steps: int = LAST) -> Any:
        args = trl.SFTConfig(**arguments(tmp_path / folder, steps), bf16=False)
        door = {"optimizer_cls_and_kwargs": (Muon.for_trainer, RATE)}
        return trl.SFTTrainer(str(tmp_path / "model"), args, train_dataset=data, **door)

    expected = trained(make("straight"))
    trained(make("resumed", 2))
    assert_same_run(trained(make("resumed"), resume=True), expected)
