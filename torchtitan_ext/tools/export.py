"""``amo export``: a checkpoint of training as a Hugging Face model, with its tokenizer.

Needs the extra ``eval``. torchtitan's adapters rename the weights and permute those that its rotary
embedding orders differently.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from amo_dist.schedule.fields import fail
from torchtitan_ext.config import files
from torchtitan_ext.runs.run_files import RUN_FILE, find_checkpoint, read_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that are copied from the folder of the tokenizer."""


CHECKPOINT_HELP = "<dump folder>/checkpoint/step-<n>, or the dump folder: its newest complete one"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Facts about a checkpoint's model that the checkpoint does not hold."""

    model: Any
    """Section ``[model]`` of the run."""
    tokenizer: Any
    """Section ``[tokenizer]``."""
    assets: str
    """``hf_assets_path``: folder or file of the tokenizer where ``[tokenizer]`` names none."""
    optimizer: str
    """``optimizer.name`` of the run."""


def find_source(checkpoint: Path, config: str | None = None) -> Source:
    """Read a checkpoint's config.

    Args:
        checkpoint: ``<dump folder>/checkpoint/step-<n>``.
        config: The run's TOML file; by default the config that the run left in its dump folder.

    Raises:
        ValueError: The config is missing or cannot be read.
    """
    from torchtitan_ext.config import settings, values
    from torchtitan_ext.data.tokenizers import Tokenizer
    from torchtitan_ext.plugin.models import Model

    if config is not None:
        read = settings.resolve(config, [])
        return Source(read.model, read.tokenizer, read.hf_assets_path, read.optimizer.name)
    folder = checkpoint.parent.parent
    sections = read_config(folder)
    if sections is None:
        path = folder / RUN_FILE
        raise ValueError(f"--config: found none and no {path}, expected the config of the run")
    fields = dict(files.fields(sections))
    needed = ("model.name", "model.flavor", "tokenizer.kind", "hf_assets_path", "optimizer.name")
    for name in needed:
        if not isinstance(fields.get(name), str):
            fail(f"config: {name}", fields.get(name), "the config of a run")
    return Source(
        values.overlay(Model(), sections["model"], "model."),
        values.overlay(Tokenizer.Config(), sections["tokenizer"], "tokenizer."),
        fields["hf_assets_path"],
        fields["optimizer.name"],
    )


def export(checkpoint: Path, output: Path, source: Source, dtype: str = "float32") -> None:
    """Write a checkpoint as a Hugging Face model.

    Args:
        checkpoint: Folder of a distributed checkpoint, saved by any number of ranks.
        output: Folder to write ``config.json``, ``model*.safetensors`` and the tokenizer into.
        source: The checkpoint's model and tokenizer.
        dtype: Dtype of the written weights.

    Raises:
        ValueError: The model is unknown or not dense, the checkpoint lacks weights, is damaged or
            none, the tokenizer is missing, ``output`` holds other files than those of an export, or
            ``transformers`` is not installed.
    """
    _require_own(output)
    require_transformers()
    kind = source.tokenizer.kind
    assets = _tokenizer_folder(source.tokenizer.path or source.assets) if kind == "hf" else None
    # Training put this token after each document; the files may name the end of a turn.
    eos = source.tokenizer.build(tokenizer_path=source.assets).eos_id
    model = load(checkpoint, source, dtype)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=output) as name:
        scratch = Path(name)
        if kind == "byte":
            byte_tokenizer().save_pretrained(scratch)
        elif assets is not None:
            for file_name in TOKENIZER_FILES:
                if (assets / file_name).is_file():
                    shutil.copyfile(assets / file_name, scratch / file_name)
        model.config.eos_token_id = model.generation_config.eos_token_id = eos
        model.save_pretrained(scratch)
        # This file says that a folder holds a model: it goes first and comes last.
        (output / "config.json").unlink(missing_ok=True)
        for file in sorted(scratch.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(output / file.name)


def _require_own(output: Path) -> None:
    """A mistyped path, such as ``/``, gets no files among those that it holds."""
    if not output.is_dir() or (output / "config.json").is_file():
        return
    # A killed export leaves these, if it was at its last moves.
    left = re.compile(
        r"\.export-.*|(generation_)?config\.json|model.*\.(safetensors|json)|.*\.jinja"
    )
    if any(not left.fullmatch(p.name) and p.name not in TOKENIZER_FILES for p in output.iterdir()):
        raise ValueError(
            f"--output: found {output}, which holds files but no exported model; expected a new or "
            "empty folder"
        )


def require_transformers() -> Any:
    """The package ``transformers``.

    Raises:
        ValueError: It is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            "transformers is not installed, expected it for exports and evaluations; "
            "pip install 'amo-dist[eval]'"
        ) from None


def _tokenizer_folder(assets: str) -> Path:
    """The folder, where ``transformers`` finds a tokenizer in it."""
    path = Path(assets).expanduser()
    folder = path.parent if path.is_file() else path
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ValueError(
            f"tokenizer.path or hf_assets_path: found no tokenizer in {folder} that "
            "transformers reads, expected tokenizer.json"
        )
    return folder


def load(checkpoint: Path, source: Source, dtype: str = "float32") -> Any:
    """A checkpoint as a ``transformers`` model on CPU; arguments and errors as :func:`export`."""
    import torch

    args, adapter, weights = _weights(checkpoint, source)
    config = hf_config(source.model.name, args)
    with torch.device("meta"):
        model = require_transformers().AutoModelForCausalLM.from_config(config)
    kind = getattr(torch, dtype)
    state = {name: weight.to(kind) for name, weight in adapter.to_hf(weights).items()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    # A tied head is the embedding: neither saved twice nor loaded twice.
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(missing) <= tied, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.to(kind)


def _weights(checkpoint: Path, source: Source) -> tuple[Any, Any, dict[str, Any]]:
    """Model config, state-dict adapter and the weights, under torchtitan's names."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan_ext.plugin import loading, models

    if source.model.name not in ("llama3", "qwen3"):
        raise ValueError(f"model.name: found {source.model.name!r}, expected 'llama3' or 'qwen3'")
    # Checkpoints hold three matrices for queries, keys and values, fused or not.
    spec = models.spec(dataclasses.replace(source.model, fuse_qkv=False, attention="sdpa"))
    with torch.device("meta"):
        model = spec.model.build()
    weights = {
        name: torch.empty(weight.shape, dtype=torch.float32)
        for name, weight in model.state_dict().items()
    }
    if spec.model.enable_weight_tying:
        weights.pop("lm_head.weight", None)
    if not (checkpoint / ".metadata").is_file():
        raise ValueError(f"checkpoint: found no .metadata in {checkpoint}, expected step-<n>")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        try:
            loading.load(weights, str(checkpoint))
        except CheckpointException as error:  # with the stack of each failure in its text
            reasons = dict.fromkeys(
                " ".join(str(failure).split()) for failure, _ in error.failures.values()
            )
            raise ValueError(f"checkpoint {checkpoint}: {'; '.join(reasons)}") from None
    return spec.model, spec.state_dict_adapter(spec.model, None), weights


def hf_config(name: str, config: Any) -> Any:
    """The ``transformers`` config of a torchtitan model.

    Args:
        name: ``llama3`` or ``qwen3``.
        config: torchtitan's config of the model.
    """
    transformers = require_transformers()
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
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
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
    from torchtitan_ext.data.tokenizers import BYTE_VOCAB_SIZE, EOS

    # Each byte has one character in the alphabet of byte-level tokenizers: printable Latin-1 is
    # itself, the other bytes are numbered from U+0100 on.
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    alphabet = {byte: chr(byte) for byte in own}
    alphabet |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    model = tokenizers.models.BPE(vocab={c: byte for byte, c in alphabet.items()}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    assert tokenizer.get_vocab_size() == BYTE_VOCAB_SIZE
    return require_transformers().PreTrainedTokenizerFast(
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
    parser.add_argument(
        "--config", help="TOML file of the run (default: the config in its dump folder)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the exported weights (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export for parsed arguments.

    Raises:
        ValueError: There is no checkpoint, or as :func:`find_source` and :func:`export`.
    """
    checkpoint = find_checkpoint(args.checkpoint)
    source = find_source(checkpoint, args.config)
    export(checkpoint, args.output, source, args.dtype)
    print(f"{checkpoint} is written to {args.output}")
    if source.tokenizer.kind == "tiktoken":
        path = source.tokenizer.path or "tiktoken's own file"
        print(f"without a tokenizer: it is tiktoken's, {source.tokenizer.encoding} of {path}")
    return 0
