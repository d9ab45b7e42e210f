"""Records what parameters the models of Hugging Face and timm have, and what becomes of each.

``python -m tests.families [FAMILY ...]`` builds those named, or all that the file holds, from their
default configurations, on the meta device, without weights or network, writes what it finds under
the name of the installed release into ``tests/golden/families.json``, classifies all that the file
holds anew, and rewrites ``docs/families.md``. A family is a class of transformers, such as
``LlamaForCausalLM``, or a model of timm, such as ``vit_base_patch16_224``.

``tests/unit/test_families.py`` trusts the operator types in the file: look at each that changed
before you commit it. A line stands for all parameters of one shape whose names differ in numbers
alone::

    "model.layers.0-31.self_attn.q_proj.weight": "4096x4096 Linear@128.128.128 attn_q"

Behind ``@`` stand the fields of `Heads`, of what divides by heads where its model tells them.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from amo_dist.operators.modules import sites_by_name
from amo_dist.operators.patterns import OUTSIDE, UNKNOWN, Classified, find_views, suggest_patterns
from amo_dist.operators.views import Heads, MatrixView, Site, in_heads
from tests.examples import ROOT, fill

RECORD = ROOT / "tests/golden/families.json"
PAGE = ROOT / "docs/families.md"
Shape: TypeAlias = "tuple[int, ...]"
Line: TypeAlias = "tuple[Shape, str, str]"
"""Shape, class of the module with its heads, and what becomes of it, as `verdict` says it."""


def verdict(classification: Classified) -> str:
    """Operator types in the order of storage, ``by columns`` where they are, or ``adamw``;
    ``unknown`` where a pattern is asked for."""
    views, reason = classification
    if views is None:
        return "unknown" if reason == UNKNOWN else "adamw"
    kinds = "+".join(dict.fromkeys(view.operator_type for view in views))
    return kinds + (" by columns" if views[0].dim else "")


def classified(parameters: Mapping[str, Line]) -> dict[str, Line]:
    """The parameters of a model, each with the verdict of today."""
    shapes = {name: shape for name, (shape, _, _) in parameters.items()}
    sites = sites_of(parameters)
    return {
        name: (shape, kind, verdict(find_views(name, {}, shapes, sites[name])))
        for name, (shape, kind, _) in parameters.items()
    }


def expand(lines: Mapping[str, str]) -> dict[str, Line]:
    """Every parameter of a family in the record, by name."""
    found: dict[str, Line] = {}
    for template, line in lines.items():
        sizes, kind, what = line.split(" ", 2)
        shape = tuple(int(size) for size in sizes.split("x")) if sizes != "()" else ()
        parts = [numbers(part) for part in template.split(".")]
        found |= {".".join(name): (shape, kind, what) for name in itertools.product(*parts)}
    return found


def numbers(part: str) -> list[str]:
    """``0-2,5`` as 0, 1, 2, 5; any other part of a name as it is."""
    if not re.fullmatch(r"[\d,-]+", part):
        return [part]
    ranges = [(each.split("-")[0], each.split("-")[-1]) for each in part.split(",")]
    return [str(number) for low, high in ranges for number in range(int(low), int(high) + 1)]


def compress(parameters: Mapping[str, Line]) -> dict[str, str]:
    """What `expand` takes apart."""
    alike: dict[tuple[str, Line], list[tuple[str, ...]]] = defaultdict(list)
    for name, line in parameters.items():
        template = re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)
        alike[template, line].append(tuple(filter(str.isdigit, name.split("."))))
    return {
        template.format(*place): f"{'x'.join(map(str, shape)) or '()'} {kind} {what}"
        for (template, (shape, kind, what)), places in alike.items()
        for place in products(places)
    }


def products(places: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Places as products: for each number of the name the values that it takes."""
    for index in reversed(range(len(places[0]))):
        values: dict[tuple[tuple[str, ...], ...], list[int]] = defaultdict(list)
        for place in places:
            values[place[:index], place[index + 1 :]].append(int(place[index]))
        places = [(*head, as_ranges(own), *tail) for (head, tail), own in values.items()]
    return places


def as_ranges(values: Iterable[int]) -> str:
    """What `numbers` takes apart."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(values)), lambda pair: pair[1] - pair[0]):
        numbers = [value for _, value in run]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}")
    return ",".join(parts)


def recorded(model: nn.Module) -> dict[str, Line]:
    """The parameters of a model, a tied one under its first name."""
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    sites = sites_by_name([model])
    found: dict[str, Line] = {}
    for name in shapes:
        site = sites.get(name, Site())  # a weight that PyTorch makes of others has no module
        views, _ = find_views(name, {}, shapes, site)
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        heads = site.heads
        if heads.query and any(in_heads(view.operator_type) for view in views or ()):
            sizes = ".".join(map(str, dataclasses.astuple(heads)))
            kind = f"{kind}@{sizes}".removesuffix(".0")
        found[name] = shapes[name], kind, ""
    return found


def sites_of(parameters: Mapping[str, Line]) -> dict[str, Site]:
    """The facts that the record holds of the modules, by parameter."""
    sites = {}
    for name, (_, kind, _) in parameters.items():
        module, _, text = kind.partition("@")
        heads = Heads(*map(int, text.split("."))) if text else Heads()
        is_transposed = module.startswith("ConvTranspose")
        sites[name] = Site(
            heads,
            is_convolution=bool(re.fullmatch(r"Conv(Transpose)?[123]d", module)),
            is_embedding=module == "Embedding",
            output_dim=int(module == "Conv1D" or is_transposed),
        )
    return sites


def build(families: Iterable[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Release, family and model."""
    for family in families:
        library = "timm" if family.islower() else "transformers"
        module = importlib.import_module(library)
        with torch.device("meta"):
            if library == "timm":
                model = module.create_model(family)
            else:
                kind = getattr(module, family)
                model = kind(kind.config_class())
        yield f"{library} {module.__version__}", family, model


def table(record: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The table of ``docs/families.md``."""
    head = ["model", "matrices", "share", "fused, as one", "to AdamW in blocks", "needs", "heads"]
    rows = [head, ["---", "---:", "---:", "---", "---", "---", "---"]]
    for release, families in record.items():
        rows.append([f"**{release}**", *[""] * (len(head) - 1)])
        has_heads = any("@" in line for lines in families.values() for line in lines.values())
        rows += [row(family, expand(lines), has_heads) for family, lines in families.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(family: str, parameters: Mapping[str, Line], has_heads: bool) -> list[str]:
    """A line of the table; ``has_heads`` where the record of its release tells heads."""
    shapes = {name: shape for name, (shape, _, _) in parameters.items()}
    sites = sites_of(parameters)
    found = {name: find_views(name, {}, shapes, sites[name], flatten_conv=True) for name in shapes}
    held = {name: views for name, (views, _) in found.items() if views}
    reason_by_name = {name: reason for name, (_, reason) in found.items() if name not in held}
    unknown = suggest_patterns(
        {name: shapes[name] for name, reason in reason_by_name.items() if reason == UNKNOWN}
    )
    convolutions = {name for name in held if sites[name].is_convolution}
    whole = {views[0].operator_type for name, views in held.items() if found[name][1]}
    reasons = {reason for name, reason in reason_by_name.items() if len(shapes[name]) == 2}
    asked = [f"{len(unknown)} patterns"] if unknown else []
    if convolutions:
        asked.append(f"`flatten_conv` for {len(convolutions)} more: {share(held, shapes)}")
    linear = [name for name in held if name not in convolutions]
    return [
        f"`{family}`",
        f"{sum(len(held[name]) for name in linear):,}",
        share(linear, shapes),
        ", ".join(f"`{kind}`" for kind in sorted(whole)),
        ", ".join(sorted(reasons - {"embedding", "head", OUTSIDE, UNKNOWN})),
        "; ".join(asked),
        ", ".join(heads_told(parameters, held)) if has_heads else "not built",
    ]


def heads_told(
    parameters: Mapping[str, Line], held: Mapping[str, Sequence[MatrixView]]
) -> list[str]:
    """Each kind of attention: how many matrices its queries and its keys become, of how many rows.

    Attentions whose projections lie in one module are told together. Behind them stands what
    ``per_head=True`` refuses.
    """
    shapes = {name: shape for name, (shape, _, _) in parameters.items()}
    counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    sites, refused = sites_of(parameters), set[str]()
    for name, matrices in held.items():
        types = {view.operator_type for view in matrices}
        if types <= {"attn_qkv", "attn_qkvz", "attn_q_gate"}:
            refused.add("interleaved: a pattern")
        if not any(map(in_heads, types)):
            continue
        rows = sites[name].heads.query
        if not rows:
            refused.add("unknown: rows")
            continue
        try:
            views, _ = find_views(name, {}, shapes, sites[name], per_head=True)
        except ValueError:
            refused.add("other rows: a pattern")
            continue
        attention = name.rsplit(".", 1 + name.endswith(".weight"))[0]
        counts[attention, rows] += Counter(view.operator_type[-3:] for view in views or ())
    kinds = []
    for (_, rows), numbers in counts.items():
        queries, keys = numbers["n_q"] + numbers["q_b"], numbers["n_k"] + numbers["k_b"]
        number = f"{queries}" if queries == keys else f"{queries}/{keys}"
        kinds.append(f"{number} x {rows}")
    return [*dict.fromkeys(kinds), *sorted(refused)] or ["none"]


def share(names: Iterable[str], shapes: Mapping[str, Shape]) -> str:
    """Of the entries of a model."""
    part, total = (sum(math.prod(shapes[name]) for name in each) for each in (names, shapes))
    return f"{part / total:.1%}"


def main(families: list[str]) -> None:
    """Rewrites the record and the page."""
    record = json.loads(RECORD.read_text())
    known_families = dict.fromkeys(itertools.chain(*record.values()))
    try:
        for release, family, model in build(families or known_families):
            record.setdefault(release, {})[family] = compress(recorded(model))
    except ImportError as error:
        print(f"No model is built: {error}")
    for known in record.values():
        for family, lines in known.items():
            known[family] = compress(classified(expand(lines)))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), "families", table(record)))


if __name__ == "__main__":
    main(sys.argv[1:])
