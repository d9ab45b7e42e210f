"""Small corpora as files, for the tests of data."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_ext.data import corpus
from torchtitan_ext.data.loader import PackedLoader
from torchtitan_ext.data.tokenizers import ByteTokenizer

END, TURN = "<|endoftext|>", "<|im_end|>"
"""Special tokens of :func:`bpe_folder`."""
BPE_SIZE = 600
"""Tokens of :func:`bpe_folder` without the special ones."""


def write_packed(
    folder: Path,
    tasks: Sequence[Sequence[str]],
    scores: Sequence[Sequence[float]] = (),
    tokenizer: Any = None,
) -> Path:
    """The files that ``amo tokenize`` writes of documents by task, over bytes by default."""
    tokenizer = tokenizer or ByteTokenizer()
    type_ = corpus.token_type(tokenizer.get_vocab_size())
    folder.mkdir(parents=True)
    for task, texts in enumerate(tasks):
        path = folder / f"{task:05d}_unshuffled.ds"
        documents = tokenizer.encode_documents(texts)
        path.write_bytes(b"".join(np.array(d, type_).tobytes() for d in documents))
        np.cumsum([len(d) for d in documents], dtype="<u8").tofile(f"{path}.index")
        if scores:
            np.array(scores[task]).tofile(f"{path}.scores")
    settings = {"tokenizer": tokenizer.identity, "tasks": len(tasks)}
    settings["score_field"] = "score" if scores else ""
    (folder / corpus.SETTINGS).write_text(json.dumps(settings))
    return folder


def packed(path: Path | str, name: str = "packed", **fields: Any) -> PackedLoader.Config:
    return PackedLoader.Config(**{"dataset": name, "dataset_path": str(path), "seed": 1, **fields})


def build(
    config: PackedLoader.Config, world: int = 1, rank: int = 0, batch: int = 2, seq_len: int = 8
) -> Any:
    """The loader of a rank, over bytes."""
    return config.build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=ByteTokenizer(),
        seq_len=seq_len,
        local_batch_size=batch,
    )


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@functools.cache
def bpe_folder() -> Path:
    """A small BPE of bytes in ``tokenizer.json``, which like Llama's begins a text with a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=BPE_SIZE, initial_alphabet=alphabet, show_progress=False)
    library = sorted(Path(json.__file__).parents[1].glob("*.py"))[::8]
    tokenizer.train_from_iterator((file.read_text()[:20_000] for file in library), trainer)
    tokenizer.add_special_tokens([END, "<|im_start|>", TURN])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, BPE_SIZE)]
    )
    folder = Path(tempfile.mkdtemp())
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
