"""Checks of a config, and of the machine that starts it: tokenizer, data, network, disk."""

from __future__ import annotations

import functools
import glob
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.hf_datasets import text_datasets as titan

from torchtitan_ext.config import checks
from torchtitan_ext.config.checks import collect
from torchtitan_ext.data.loader import named_for, open_corpora
from torchtitan_ext.plugin import machine
from torchtitan_ext.runs.run_files import checkpoints
from torchtitan_ext.tools.preflight_memory import check_memory, checkpoint_sizes

HUB = "https://huggingface.co"
HUB_SECONDS = 5.0
"""After which the hub counts as out of reach."""


def validate_config(
    config: Any, world_size: int, memory_gb: float | None = None
) -> tuple[Any, list[str]]:
    """Complete a config, and check how its fields fit together and with a world.

    Args:
        config: Config as :func:`torchtitan_ext.config.settings.load` reads it; stays as it is.
        world_size: Number of ranks.
        memory_gb: Memory of a rank's device in 1e9 bytes; None leaves memory unchecked.

    Returns:
        The config, complete as far as it has no mistakes, and a line for each mistake.
    """
    config, problems = checks.validate_config(config, world_size)
    if memory_gb is not None and not problems:  # sizes mean little before all fits together
        by_name = checks.degrees(config, world_size)
        collect(problems, lambda: check_memory(config, by_name, memory_gb))
    return config, problems


def validate_for_machine(config: Any, ranks: int, nodes: int = 1) -> tuple[Any, list[str]]:
    """Complete a config and check it for this node; what this machine lacks comes last.

    Args:
        config: Config as :func:`torchtitan_ext.config.settings.load` reads it.
        ranks: Processes of a node.
        nodes: Nodes of the run.

    Returns:
        The config, and a line for each mistake.
    """
    # A rank on CPU has its share of the machine's memory.
    memory_gb = machine.gpu_memory_gb() or machine.memory_bytes() / ranks / 1e9
    config, problems = validate_config(config, ranks * nodes, memory_gb)
    return config, problems or missing_on_this_machine(config)


def missing_on_this_machine(config: Any) -> list[str]:
    """Check what a config needs of this machine; a line for each lack.

    Args:
        config: A checked config.
    """
    problems: list[str] = []

    tokenizer = collect(problems, lambda: _tokenizer(config))
    needs_hub = []
    for section, loader in loaders(config):
        if name := hub_name(loader):
            needs_hub.append((section, name))
        else:
            collect(problems, functools.partial(_data, loader, tokenizer))
    if needs_hub and (reason := _why_no_hub()):
        problems += [
            f"{section}.dataset_path: found the dataset {name!r} on the hub, which {reason}; "
            "expected a network, or the path of a copy on disk"
            for section, name in needs_hub
        ]
    collect(problems, lambda: _initial(config.checkpoint))
    collect(problems, lambda: _disk(config))
    return problems


def _tokenizer(config: Any) -> Any:
    """The tokenizer, which must be there and fit the model.

    Raises:
        ValueError: Otherwise.
    """
    section, model = config.tokenizer, config.model_spec.model
    field, path = "tokenizer.path", section.path
    if not path:
        field, path = "hf_assets_path", config.hf_assets_path
    if section.kind == "hf" and not Path(path).expanduser().exists():
        raise ValueError(f"{field}: found no tokenizer in {path} on this machine, expected one")
    try:
        tokenizer = section.build(tokenizer_path=config.hf_assets_path)
    except ValueError:
        raise
    except Exception as error:  # the readers of files raise what they like
        raise ValueError(f"{field}: the tokenizer in {path} cannot be read: {error}") from None
    if (size := tokenizer.get_vocab_size()) > model.vocab_size:
        raise ValueError(
            f"model.flavor: found {config.model.flavor!r} with a vocabulary of {model.vocab_size} "
            f"tokens, expected at least the {size} of the tokenizer ({section.kind!r})"
        )
    return tokenizer


def loaders(config: Any) -> Iterator[tuple[str, Any]]:
    """The sections of data that are read, each with the name of what it serves."""
    yield "dataloader", config.dataloader
    if config.validator.enable:
        yield "validator.dataloader", config.validator.dataloader


def hub_name(loader: Any) -> str | None:
    """The name of a dataset on the hub; ``None`` for what is read from this machine."""
    name, path = loader.dataset, loader.dataset_path
    if name.lower() not in titan.DATASETS:
        return None
    path = path or titan.DATASETS[name.lower()].path
    if path is None or Path(path).expanduser().exists() or glob.has_magic(path):
        return None
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1
    return None if is_path else str(path)


def _data(loader: Any, tokenizer: Any) -> None:
    """Check that the data of a loader is on this machine.

    Raises:
        ValueError: For data that is nowhere, or does not fit.
    """
    name, path = loader.dataset, loader.dataset_path
    with named_for(loader):
        if name == "packed" and tokenizer is not None:
            open_corpora(loader, tokenizer)
        stock = titan.DATASETS.get(name.lower())  # a loader of the user is not among them
        if stock is not None and not Path(path or stock.path).exists():
            raise ValueError(f"dataloader.dataset_path: no such file or folder: {path!r}")


def _why_no_hub() -> str | None:
    """Why the hub cannot be reached from here; ``None`` where it can."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} = {os.environ[name]} forbids"
    endpoint = os.environ.get("HF_ENDPOINT", HUB)
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:  # an answer
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"cannot be reached at {endpoint} ({reason})"
    return None


def _initial(section: Any) -> None:
    path = section.initial_load_path
    if path and "://" not in path and not Path(path).exists():
        raise ValueError(
            f"checkpoint.initial_load_path: found no checkpoint in {path} on this machine, "
            "expected one"
        )


def _disk(config: Any) -> None:
    """Check that the dump folder and that of checkpoints can be written, and hold what comes."""
    folder = Path(config.dump_folder)
    at = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not at.is_dir() or not os.access(at, os.W_OK):
        raise ValueError(f"dump_folder: found {folder}, which cannot be written; expected a folder")
    run = checkpoint_sizes(config)
    if not run["checkpoints_saved"]:
        return
    saves = folder / config.checkpoint.folder
    if saves.exists() and not (saves.is_dir() and os.access(saves, os.W_OK)):
        raise ValueError(
            f"checkpoint.folder: found {saves}, which cannot be written; expected a folder"
        )
    paths_saved = [path for saved in checkpoints(saves).values() for path in saved.rglob("*")]
    held = sum(path.stat().st_size for path in paths_saved if path.is_file())
    free = shutil.disk_usage(at).free + held  # what is purged, or stays and is counted below
    kept, size = run["checkpoints_kept"], run["checkpoint_bytes"]
    most = min(kept + 1, run["checkpoints_saved"])  # a new one before the oldest goes
    if free < most * size:
        raise ValueError(
            f"checkpoint.keep_latest_k: found {config.checkpoint.keep_latest_k}, for which "
            f"{most} checkpoints of {size / 1e9:.2f} GB lie in {folder}; expected at most the "
            f"{free / 1e9:.2f} GB that it can take"
        )
