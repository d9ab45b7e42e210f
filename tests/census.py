"""What `param_groups` makes of the models of eight libraries.

``python -m tests.census [LIBRARY ...]`` builds each architecture of the libraries named, or of all
that are installed, from its default configuration, on the meta device, without weights or network.
It writes a row of each into ``tests/golden/census.json``, the verdict on every parameter of those
that ``tests/golden/families.json`` names into that file, and rewrites ``docs/families.md``. Those
that ``tests/golden/skeletons.json`` names are recorded whole, to be tested without their library.

Look at each row and each operator type that changed before you commit it. A line of
``families.json`` stands for all parameters of one shape whose names differ in numbers alone::

    "model.layers.0-31.self_attn.q_proj.weight": "4096x4096 attn_q"
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import itertools
import json
import pkgutil
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

from amo_dist.operators.groups import decide
from amo_dist.operators.parts import AS_ONE, ASSUMED, cut
from amo_dist.operators.roles import OUTSIDE, UNKNOWN
from amo_dist.operators.tree import Place, read_tree
from tests import skeletons
from tests.examples import ROOT, fill

CENSUS = ROOT / "tests/golden/census.json"
FAMILIES = ROOT / "tests/golden/families.json"
SKELETONS = ROOT / "tests/golden/skeletons.json"
PAGE = ROOT / "docs/families.md"
# Tasks of transformers whose first class stands for an architecture.
TASKS = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM"),
    *("SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION", "OBJECT_DETECTION"),
    *("ZERO_SHOT_OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
    *("DEPTH_ESTIMATION", "TEXT_TO_WAVEFORM", "MASK_GENERATION", "TIME_SERIES_PREDICTION"),
    *("VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "PRETRAINING"),
)
# Kernels and private modules that a model is built, and not run, without.
ABSENT = (
    *("selective_scan_cuda", "causal_conv1d_cuda", "causal_conv1d"),
    "torch._inductor.kernel.flex_attention",
)
Build = Callable[[], nn.Module]


def of_transformers() -> Iterator[tuple[str, Build]]:
    library = importlib.import_module("transformers")
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    configurations = importlib.import_module("transformers.models.auto.configuration_auto")
    no_init_weights = importlib.import_module("transformers.initialization").no_init_weights
    names = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS] + ["MODEL_MAPPING_NAMES"]
    tables = [getattr(auto, name) for name in names if hasattr(auto, name)]

    def build(kind: str) -> nn.Module:
        architecture = getattr(library, kind)
        with no_init_weights():
            model: nn.Module = architecture(architecture.config_class())
        model.tie_weights()  # type: ignore[operator]
        return model

    recorded = json.loads(FAMILIES.read_text()).get(f"transformers {library.__version__}", {})
    for model_type in [*configurations.CONFIG_MAPPING_NAMES]:
        kind = next((table[model_type] for table in tables if model_type in table), None)
        if kind is not None:
            recorded[kind if isinstance(kind, str) else kind[0]] = None
    for name in recorded:
        yield name, functools.partial(build, name)


def of_timm() -> Iterator[tuple[str, Build]]:
    """The first model of each kind in each module."""
    library = importlib.import_module("timm")
    firsts = {}
    for module in library.list_modules():
        for name in sorted(library.list_models(module=module), reverse=True):
            firsts[module, re.split(r"[_\d]", name)[0]] = name
    recorded = json.loads(FAMILIES.read_text()).get(f"timm {library.__version__}", {})
    for name in dict.fromkeys([*firsts.values(), *recorded]):
        yield name, functools.partial(library.create_model, name)


def of_torchvision() -> Iterator[tuple[str, Build]]:
    models = importlib.import_module("torchvision.models")
    for name in models.list_models():
        build = models.get_model_builder(name)
        names = inspect.signature(build).parameters
        yield name, functools.partial(build, **dict.fromkeys({"weights_backbone"} & {*names}))


def of_diffusers() -> Iterator[tuple[str, Build]]:
    library = importlib.import_module("diffusers")
    for name in sorted(dir(library)):
        kind: Any = getattr(library, name, None)
        if library.ModelMixin in getattr(kind, "__mro__", ()):
            yield name, kind


def from_default(kind: Any) -> nn.Module:
    """A model of the default configuration of its class."""
    model: nn.Module = kind(kind.config_class())
    return model


def of_fla() -> Iterator[tuple[str, Build]]:
    models = importlib.import_module("fla.models")
    for name in sorted(dir(models)):
        if name.endswith("ForCausalLM"):
            kind = getattr(models, name)
            yield name, functools.partial(from_default, kind)


def of_litgpt() -> Iterator[tuple[str, Build]]:
    """The first of each family, and its first mixture."""
    model, config = (importlib.import_module(f"litgpt.{name}") for name in ("model", "config"))
    firsts: dict[object, dict[str, Any]] = {}
    for fields in config.configs:
        firsts.setdefault((re.split(r"[-\d]", fields["name"])[0], "n_expert" in fields), fields)
    for fields in firsts.values():
        yield fields["name"], functools.partial(model.GPT, model.Config(**fields))


def of_torchtune() -> Iterator[tuple[str, Build]]:
    models = importlib.import_module("torchtune.models")
    for info in pkgutil.iter_modules(models.__path__):
        module = importlib.import_module(f"torchtune.models.{info.name}")
        sizes = (n for n in dir(module) if re.fullmatch(r"(?!q?lora).*_(\d+b|mini|\d+e)", n))
        yield from ((name, getattr(module, name)) for name in itertools.islice(sizes, 1))


def of_mamba_ssm() -> Iterator[tuple[str, Build]]:
    config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig
    model = importlib.import_module("mamba_ssm.models.mixer_seq_simple").MambaLMHeadModel
    attention = {"attn_layer_idx": [4, 8], "attn_cfg": {"num_heads": 16, "causal": True}}
    options: dict[str, dict[str, Any]] = {
        "Mamba": {},
        "Mamba2": {"ssm_cfg": {"layer": "Mamba2"}},
        "Mamba2, attention": {"ssm_cfg": {"layer": "Mamba2"}, "d_intermediate": 4096, **attention},
    }
    for name, own in options.items():
        sizes = {"d_model": 2048, "n_layer": 12, "vocab_size": 50277, **own}
        yield name, functools.partial(model, config(**sizes))


LIBRARIES = {
    name.removeprefix("of_"): architectures
    for name, architectures in list(globals().items())
    if name.startswith("of_")
}


def template(name: str) -> str:
    """A name with N for its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "N", name)


def row(places: list[Place]) -> dict[str, Any]:
    """The figures of an architecture."""
    matrices, entries, rest = Counter[str](), Counter[str](), Counter[str]()
    doubts = defaultdict[str, dict[str, None]](dict)
    for place in places:
        views, number = cut(place, False), place.parameter.numel()
        matrices.update(view.operator_type for view in views)
        entries["all"] += number
        entries["matrices"] += number * bool(views)
        if sum(size > 1 for size in place.shape) < 2 or place.is_convolution:
            continue
        if place.reason in (UNKNOWN, ASSUMED, AS_ONE, OUTSIDE):
            doubts[place.reason][template(place.name)] = None
        if place.node.in_block:
            entries["blocks"] += number
            rest[place.reason] += number * (not views)
    blocks = entries["blocks"]
    lost = {reason: round(n / blocks, 4) for reason, n in rest.items() if n and reason != UNKNOWN}
    linears = [p for p in places if p.is_linear and p.node.in_block]
    figures = {
        "matrices": matrices.total(),
        "blocks": round(1 - rest.total() / blocks, 4) if linears else None,
        "all": round(entries["matrices"] / entries["all"], 4),
        "adamw": lost,
        **{name: [*doubts[name]] for name in (UNKNOWN, ASSUMED, AS_ONE)},
        "outside": len(doubts[OUTSIDE]),
    }
    return {name: value for name, value in figures.items() if value or name == "matrices"}


def decided(model: nn.Module) -> list[Place]:
    """The parameters of a model, decided on."""
    places = read_tree(model)
    decide(places, {})
    return places


def verdict(place: Place) -> str:
    """Operator types in the order of storage, ``by columns`` where they are, or the reason."""
    views = cut(place, False)
    if not views:
        return f"adamw ({place.reason})" if place.reason != UNKNOWN else "unknown"
    kinds = "+".join(dict.fromkeys(view.operator_type for view in views))
    number = len({box[0] for view in views[:1] for box in view.boxes or ()})
    return kinds + f" in {number} turns" * (number > 1) + " by columns" * views[0].dim


def expand(lines: dict[str, str]) -> dict[str, str]:
    """Every parameter of a family in the record, by name."""
    names: dict[str, str] = {}
    for name, line in lines.items():
        parts = [numbers(part) for part in name.split(".")]
        names |= {".".join(place): line for place in itertools.product(*parts)}
    return names


def numbers(part: str) -> list[str]:
    """``0-2,5`` as 0, 1, 2, 5; any other part of a name as it is."""
    if not re.fullmatch(r"[\d,-]+", part):
        return [part]
    ranges = [(run.split("-")[0], run.split("-")[-1]) for run in part.split(",")]
    return [str(number) for low, high in ranges for number in range(int(low), int(high) + 1)]


def compress(places: Iterable[Place]) -> dict[str, str]:
    """What `expand` takes apart."""
    alike: dict[tuple[str, str], list[tuple[str, ...]]] = defaultdict(list)
    for place in places:
        line = f"{'x'.join(map(str, place.shape)) or '()'} {verdict(place)}"
        digits = tuple(filter(str.isdigit, place.name.split(".")))
        alike[re.sub(r"(?<![^.])\d+(?![^.])", "{}", place.name), line].append(digits)
    return {
        name.format(*where): line
        for (name, line), all_of in alike.items()
        for where in ranges(all_of)
    }


def ranges(places: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Places as products: for each number of the name the values that it takes."""
    for index in reversed(range(len(places[0]))):
        values: dict[tuple[tuple[str, ...], ...], list[int]] = defaultdict(list)
        for place in places:
            values[place[:index], place[index + 1 :]].append(int(place[index]))
        places = [(*head, as_range(own), *tail) for (head, tail), own in values.items()]
    return places


def as_range(values: Iterable[int]) -> str:
    """What `numbers` takes apart."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(values)), lambda pair: pair[1] - pair[0]):
        own = [value for _, value in run]
        parts.append(f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}")
    return ",".join(parts)


def table(census: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The table of ``docs/families.md``: architectures with linear modules in blocks."""
    head = ["architecture", "matrices", "of blocks", "of all", "to AdamW in blocks", "remarks"]
    lines = [head, ["---", "---:", "---:", "---:", "---", "---"]]
    for release, rows in census.items():
        lines.append([f"**{release}**", *[""] * (len(head) - 1)])
        for name, own in rows.items():
            if "blocks" not in own:
                continue
            unknown = own.get(UNKNOWN, [])
            remarks = [f"as one: `{parameter}`" for parameter in own.get(AS_ONE, [])[:2]]
            if unknown:
                remarks.append(f"patterns for {len(unknown)}, such as `{unknown[0]}`")
            lost = [f"{why} {n:.1%}" for why, n in own.get("adamw", {}).items() if n >= 0.0005]
            figures = [f"{own['matrices']:,}", f"{own['blocks']:.1%}", f"{own.get('all', 0):.1%}"]
            lines.append([f"`{name}`", *figures, ", ".join(lost), "; ".join(remarks)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def built(library: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Release, architecture and model of all that builds within two minutes."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    version = getattr(importlib.import_module(library), "__version__", None)
    release = f"{library} {version or importlib.metadata.version(library)}"
    for name, build in LIBRARIES[library]():
        try:
            signal.alarm(120)
            with torch.device("meta"):
                model = build()
            signal.alarm(0)
        except Exception as error:  # a default configuration that is none
            signal.alarm(0)
            print(f"{name}: {type(error).__name__}: {str(error)[:100]}")
            continue
        yield release, name, model


def write(file: Path, values: dict[str, dict[str, Any]]) -> None:
    """Write JSON with a line for each architecture."""
    releases = [
        f"{json.dumps(release)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(own)}" for name, own in rows.items())
        + "\n}"
        for release, rows in values.items()
    ]
    file.write_text("{\n" + ",\n".join(releases) + "\n}\n")


def main(libraries: list[str]) -> None:
    """Write the golden files and the page."""
    for name in ABSENT:
        sys.modules.setdefault(name, MagicMock())
    # PyPI's torchvision is built for CUDA, and its operators are not needed to build a model.
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor boxes) -> Tensor")
    census, families, recorded = (json.loads(f.read_text()) for f in (CENSUS, FAMILIES, SKELETONS))
    for library in libraries or LIBRARIES:
        try:
            for release, name, model in built(library):
                places = decided(model)
                census.setdefault(release, {})[name] = row(places)
                if name in families.get(release, {}):
                    families[release][name] = compress(places)
                if name in recorded.get(release, {}):
                    recorded[release][name] = skeletons.record(model)
        except ImportError as error:
            print(f"{library} is not installed: {error}")
    for release, models in recorded.items():
        for name, skeleton in models.items():
            if skeleton:
                families[release][name] = compress(decided(skeletons.rebuild(skeleton)))
    for file, values in ((CENSUS, census), (FAMILIES, families), (SKELETONS, recorded)):
        write(file, values)
    PAGE.write_text(fill(PAGE.read_text(), "families", table(census)))


if __name__ == "__main__":
    main(sys.argv[1:])
