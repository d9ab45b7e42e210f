"""Models as what `param_groups` sees of them: classes, attributes, names and shapes, without code.

`record` writes a model as JSON, where alike parts of it stand once, and `rebuild` makes of that a
model on the meta device, whose modules have those classes in name, and the bases of PyTorch in
fact. So a model of any library is tested where that library is not installed.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

# Bases that the rules ask for by `isinstance`.
BASES = (
    nn.Linear,
    nn.Bilinear,
    nn.EmbeddingBag,
    nn.Embedding,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Sequential,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    _ConvNd,
    nn.ParameterList,
    nn.ParameterDict,
)


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, flags and short texts by name."""
    return {
        name: value
        for name, value in sorted(values.items())
        if type(value) in (int, bool, str)
        and name[0] != "_"
        and not re.fullmatch(r"training|\w*(layer|block)\w*(idx|id|number|index)|depth", name)
        and len(str(value)) < 40
    }


def config_of(module: nn.Module) -> dict[str, Any]:
    config = vars(module).get("config")
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return scalars(values)


def record(model: nn.Module) -> dict[str, Any]:
    """A model as JSON: its modules, each kind once, and names of one parameter."""
    nodes: dict[str, int] = {}
    configs: dict[str, int] = {}

    def visit(module: nn.Module) -> int:
        children = [[name, visit(child)] for name, child in module.named_children()]
        kinds = [kind.__name__ for kind in type(module).__mro__]
        kinds = kinds[: type(module).__mro__.index(nn.Module)] or ["Module"]
        base = next((kind.__name__ for kind in BASES if isinstance(module, kind)), "Module")
        shapes = {
            n: [list(p.shape), str(p.dtype).split(".")[1]]
            for n, p in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        config = config_of(module)
        index = configs.setdefault(json.dumps(config), len(configs)) if config else -1
        library = type(module).__module__.partition(".")[0]
        node = [kinds, base, library, scalars(vars(module)), index, shapes, children]
        return nodes.setdefault(json.dumps(node), len(nodes))

    # A child that occurs twice would be visited once by named_children.
    visit(model)
    ties: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties[id(parameter)].append(name)
    return {
        "nodes": [json.loads(node) for node in nodes],
        "configs": [json.loads(config) for config in configs],
        "ties": [names for names in ties.values() if len(names) > 1],
    }


class Config:
    """The scalars of a configuration."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)


def rebuild(recorded: Mapping[str, Any]) -> nn.Module:
    """The model of a record, on the meta device; it cannot compute."""
    nodes, configs = recorded["nodes"], [Config(values) for values in recorded["configs"]]
    base_by_name = {kind.__name__: kind for kind in BASES} | {"Module": nn.Module}
    classes: dict[tuple[str, ...], type[nn.Module]] = {}

    def class_of(kinds: list[str], base: str, library: str) -> type[nn.Module]:
        kinds = kinds or ["Module"]
        key = (base, library, *kinds)
        if key not in classes:
            parent = base_by_name[base]
            if len(kinds) > 1 and kinds[0] != base:
                parent = class_of(kinds[1:], base, library)
            body = {"__module__": library}
            classes[key] = parent if kinds[0] == base else type(kinds[0], (parent,), body)
        return classes[key]

    def make(index: int) -> nn.Module:
        kinds, base, library, attributes, config, shapes, children = nodes[index]
        kind = class_of(kinds, base, library)
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        for name, value in attributes.items():
            vars(module)[name] = value
        if config >= 0:
            vars(module)["config"] = configs[config]
        for name, (shape, dtype) in shapes.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            floats = tensor.is_floating_point() or tensor.is_complex()
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=floats))
        for name, child in children:
            module.add_module(name, make(child))
        return module

    model = make(len(nodes) - 1)
    for first, *others in recorded["ties"]:
        parameter = model.get_parameter(first)
        for name in others:
            parent, _, own = name.rpartition(".")
            try:
                module = model.get_submodule(parent)
            except AttributeError:
                continue
            module._parameters[own] = parameter
    return model
