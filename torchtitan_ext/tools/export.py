"""``amo export``: a checkpoint of training as a Hugging Face model, with its tokenizer.

Needs the extra ``eval``. torchtitan's adapters rename the weights and permute those that its rotary
embedding orders differently.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_ext.runs import files
from torchtitan_ext.runs.run_files import RUN_FILE, find_checkpoint, read_config

TOKENIZER_FILES = ("*token*", "vocab.json", "merges.txt")
"""Files that are copied from the folder of the tokenizer."""

CHECKPOINT_HELP = "<dump folder>/checkpoint/step-<n>, or the dump folder: its newest complete one"


class Source(NamedTuple):
    """Facts about a checkpoint's model that the checkpoint does not hold: sections of its run.

    Attributes:
        model: ``[model]``.
        tokenizer: ``[tokenizer]``, with the path of its files.
        optimizer: ``optimizer.name``.
    """

    model: Any
    tokenizer: Any
    optimizer: str


def find_source(checkpoint: Path) -> Source:
    """Read the config that a run left in its dump folder.

    Args:
        checkpoint: ``<dump folder>/checkpoint/step-<n>``.

    Raises:
        ValueError: The config is missing or cannot be read.
    """
    from torchtitan_ext.config import values
    from torchtitan_ext.data.tokenizers import Tokenizer
    from torchtitan_ext.plugin.models import Model

    path = checkpoint.parent.parent / RUN_FILE
    sections = read_config(path.parent)
    if sections is None:
        raise ValueError(f"checkpoint: found no {path}, expected the config of the run")
    try:
        model = values.overlay(Model(), sections["model"], "model.")
        tokenizer = values.overlay(Tokenizer.Config(), sections["tokenizer"], "tokenizer.")
        if tokenizer.kind == "hf" and not tokenizer.path:
            tokenizer.path = sections["hf_assets_path"]
        return Source(model, tokenizer, sections["optimizer"]["name"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: found no {error}, expected the config of a run") from None


def export(checkpoint: Path, output: Path, source: Source) -> None:
    """Write a checkpoint as a Hugging Face model of float32 weights.

    Args:
        checkpoint: Folder of a distributed checkpoint, saved by any number of ranks.
        output: Folder to write ``config.json``, ``model*.safetensors`` and the tokenizer into.
        source: The checkpoint's model and tokenizer.

    Raises:
        ValueError: The model is unknown or not dense, the checkpoint lacks weights, is damaged or
            none, the tokenizer is missing, or ``output`` holds files.
        ModuleNotFoundError: ``transformers`` is not installed.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"--output: found files in {output}, expected a new or empty folder")
    section = source.tokenizer
    tokenizer = section.build(tokenizer_path="")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        config, weights = _load(checkpoint, source)
        output.mkdir(parents=True, exist_ok=True)
        save(weights, storage_writer=HuggingFaceStorageWriter(str(output)))
    if section.kind == "byte":
        byte_tokenizer().save_pretrained(output)
    elif section.kind == "hf":
        folder = Path(section.path).expanduser()
        folder = folder.parent if folder.is_file() else folder
        for pattern in TOKENIZER_FILES:
            for file in folder.glob(pattern):
                shutil.copyfile(file, output / file.name)
        # Training put no token before a document; many files have one put before each text.
        _update(output / "tokenizer.json", {"post_processor": None})
        if (options := output / "tokenizer_config.json").exists():
            _update(options, {"add_bos_token": False, "add_eos_token": False})
    # Training put this token after each document; the files may name the end of a turn.
    config.eos_token_id = tokenizer.eos_id
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(output)


def _update(file: Path, values: dict[str, Any]) -> None:
    content = files.read_json(file) | values
    files.replace(file, json.dumps(content, indent=1, ensure_ascii=False))


def _load(checkpoint: Path, source: Source) -> tuple[Any, dict[str, Any]]:
    """Config of ``transformers``, and the weights under its names, on CPU."""
    import torch

    from torchtitan_ext.plugin import loading, models

    if source.model.name not in ("llama3", "qwen3"):
        raise ValueError(f"model.name: found {source.model.name!r}, expected 'llama3' or 'qwen3'")
    # Checkpoints hold three matrices for queries, keys and values, fused or not.
    spec = models.spec(dataclasses.replace(source.model, fuse_qkv=False, attention="sdpa"))
    with torch.device("meta"):
        shapes = spec.model.build().state_dict()
    weights = {name: torch.empty(weight.shape) for name, weight in shapes.items()}
    if spec.model.enable_weight_tying:  # the head is the embedding: neither saved twice nor loaded
        weights.pop("lm_head.weight", None)
    if not (checkpoint / ".metadata").is_file():
        raise ValueError(f"checkpoint: found no .metadata in {checkpoint}, expected step-<n>")
    config = hf_config(source.model.name, spec.model)
    loading.load(weights, str(checkpoint))
    config.dtype = "float32"
    return config, spec.state_dict_adapter(spec.model, None).to_hf(weights)


def hf_config(name: str, config: Any) -> Any:
    """The ``transformers`` config of a torchtitan model.

    Args:
        name: ``llama3`` or ``qwen3``.
        config: torchtitan's config of the model.
    """
    transformers: Any = importlib.import_module("transformers")
    layer = config.layers[0]
    attention, rope = layer.attention, layer.attention.rope
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or config.dim // attention.n_heads,
        "max_position_embeddings": rope.max_seq_len,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": float(rope.theta),
        "tie_word_embeddings": config.enable_weight_tying,
        "bos_token_id": None,
    }
    if name == "qwen3":
        return transformers.Qwen3Config(**common)
    return transformers.LlamaConfig(
        **common,
        rope_scaling={
            "rope_type": "llama3",
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        },
    )


def byte_tokenizer() -> Any:
    """The tokens of ``torchtitan_ext.data.tokenizers.ByteTokenizer``, for ``transformers``."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    slow: Any = importlib.import_module("transformers.convert_slow_tokenizer")
    from torchtitan_ext.data.tokenizers import EOS

    # Byte-level tokenizers have one character for each byte.
    alphabet = slow.bytes_to_unicode()
    model = tokenizers.models.BPE(vocab={c: byte for byte, c in alphabet.items()}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # within a text, the end token's name is plain text
    )


def add_command(subparsers: Any) -> None:
    """Register ``export``."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model",
        description="Write a checkpoint of training as a Hugging Face model with its tokenizer.",
    )
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export for parsed arguments.

    Raises:
        ValueError: There is no checkpoint, or as :func:`find_source` and :func:`export`.
    """
    print("loading PyTorch and torchtitan ...", file=sys.stderr, flush=True)
    checkpoint = find_checkpoint(args.checkpoint)
    source = find_source(checkpoint)
    export(checkpoint, args.output, source)
    print(f"{checkpoint} is written to {args.output}")
    if source.tokenizer.kind == "tiktoken":
        print(f"without a tokenizer: it is tiktoken's, {source.tokenizer.encoding}")
    return 0
