"""The tree of modules: each parameter with its place, and the facts that the modules there give."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from amo_dist.config import require
from amo_dist.operators.patterns import WRAPPER, Target, clean_name
from amo_dist.operators.views import MatrixView

_NUMBER_OF_HEADS = re.compile(
    r"(?:num_|n_|\w*coder_)?(?:local_)?"
    r"(?:(?:attn|attention|query|q|value|v|key_value|key|kv|k)_)?n?heads?|\w*query_groups"
)
# Containers whose only element is a block, too, and those whose elements never are.
_BLOCKS = re.compile(r"\w*(?:layers?|blocks?)|h|layer\d|stages?|conformer")
_NO_BLOCKS = re.compile(r"\w*(?:head|embed|classifier|hypernetworks_mlp|prediction)s?")
# Wrappers that call their only inner module ``module``.
_REPLICATED = {"DistributedDataParallel", "DataParallel"}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Rows per head in each projection of an attention; all 0 if no module says.

    Attributes:
        query: Rows of a query head. In latent attention it has more than a key head: those at its
            end rotate with the position, and all heads share the rotary keys.
        key: Rows of a key head; in latent attention those without rotary positions.
        value: Rows of a value head.
    """

    query: int = 0
    key: int = 0
    value: int = 0

    def rows(self, operator_type: str) -> int:
        """Rows of a head of a type, such as ``attn_q`` and ``mla_k_b``."""
        return {"q": self.query, "k": self.key, "v": self.value}[operator_type.split("_")[1]]


@dataclasses.dataclass(eq=False)
class Place:
    """A parameter, where it stands, and what becomes of it.

    Attributes:
        name: Cleaned name.
        parameter: The parameter itself.
        node: Module that owns it.
        is_embedding: Whether an ``nn.Embedding`` or ``nn.EmbeddingBag`` holds it, perhaps under
            another name.
        kind: Operator type that its role gives, None for AdamW.
        target: The target in the form of a pattern's value.
        reason: Reason for AdamW, or a remark on what is doubtful.
        views: Matrices of the target; none for AdamW.
    """

    name: str
    parameter: nn.Parameter
    node: Node
    is_embedding: bool = False
    kind: str | None = None
    target: Target = None
    reason: str = ""
    views: tuple[MatrixView, ...] = ()

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.parameter.shape)

    @property
    def field(self) -> str:
        """Name of the parameter in its module."""
        return self.name.rpartition(".")[2]

    @cached_property
    def is_convolution(self) -> bool:
        """Whether the parameter belongs to a convolution of one, two or three dims."""
        is_kernel = self.field == "weight" and len(self.shape) == 4
        return is_kernel or isinstance(self.node.module, _ConvNd)

    @cached_property
    def is_linear(self) -> bool:
        """Whether the parameter is the weight of ``nn.Linear`` or of what behaves like one."""
        if len(self.shape) != 2 or self.field != "weight" or self.is_embedding:
            return False
        fields = vars(self.node.module)
        sizes = fields.get("out_features"), fields.get("in_features")
        return sizes == self.shape or any("Linear" in k or k == "Conv1D" for k in self.node.kinds)

    @property
    def is_stack(self) -> bool:
        """Whether the parameter may be several matrices, one behind the other."""
        return len(self.shape) == 3 and not self.is_convolution and min(self.shape) > 1

    @cached_property
    def output_dim(self) -> int:
        """Dim that counts outputs: 1 in GPT-2's ``Conv1D`` and in transposed convolutions."""
        is_transposed = isinstance(self.node.module, _ConvTransposeNd)
        return int(is_transposed or "Conv1D" in self.node.kinds)

    @property
    def outputs(self) -> int:
        """Rows of a matrix that maps from columns."""
        return self.shape[self.output_dim]

    @property
    def inputs(self) -> int:
        """Columns of a matrix that maps to rows."""
        return self.shape[1 - self.output_dim]


@dataclasses.dataclass(eq=False)
class Node:
    """A module of the tree; what wrappers add is no level of it.

    Attributes:
        name: Last component of its name.
        module: The module.
        parent: Module around it.
        in_block: Whether the module is a block, or inside one.
        places: Parameters of its own.
        children: Modules of its own.
    """

    name: str
    module: nn.Module
    parent: Node | None
    in_block: bool = False
    places: list[Place] = dataclasses.field(default_factory=list)
    children: list[Node] = dataclasses.field(default_factory=list)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Names of the module's class and of that one's bases, as FSDP2 makes a subclass."""
        return frozenset(kind.__name__ for kind in type(self.module).__mro__[:-2])

    def is_called(self, word: str) -> bool:
        """Whether the module's name or a class's contains a word."""
        return any(word in text.lower() for text in (self.name, *self.kinds))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Fields of the module's own configuration."""
        config = vars(self.module).get("config")
        return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})

    @cached_property
    def heads(self) -> Heads:
        """Rows per head that the nearest module around gives."""
        heads = _read(vars(self.module)) or _read(self.config)
        return heads or (self.parent.heads if self.parent else Heads())

    @cached_property
    def own_num_heads(self) -> frozenset[int]:
        """Numbers of heads that the module itself gives."""
        return _numbers_of_heads(vars(self.module))

    @cached_property
    def num_heads(self) -> frozenset[int]:
        """Numbers of heads that the nearest module around gives."""
        numbers = self.own_num_heads or _numbers_of_heads(self.config)
        return numbers or (self.parent.num_heads if self.parent else frozenset())

    @cached_property
    def num_experts(self) -> frozenset[int]:
        """Numbers of experts that the module directly holds, in stacks or in a list."""
        inner = [self, *self.children]
        inner += [node for child in self.children for node in child.children]
        numbers = {place.shape[0] for node in inner for place in node.places if place.is_stack}
        for child in self.children:
            counts = Counter(type(element.module) for element in child.children if element.linears)
            numbers |= {max(counts.values())} if counts and child.is_container else set()
        return frozenset(numbers - {1})

    @cached_property
    def undecayed(self) -> frozenset[str]:
        """Names of parameters that timm's method spares from weight decay, from here."""
        method = getattr(self.module, "no_weight_decay", None)
        return frozenset(method() if callable(method) else ())

    @property
    def is_container(self) -> bool:
        """Whether the module is a list of others."""
        is_numbered = {child.name.isdigit() for child in self.children} == {True}
        return is_numbered or isinstance(self.module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))

    @cached_property
    def linears(self) -> list[Place]:
        """Weights of linear modules here and below."""
        own = [place for place in self.places if place.is_linear]
        return own + [place for child in self.children for place in child.linears]

    def around(self) -> Iterator[Node]:
        """The module, and the ones around it."""
        yield self
        if self.parent:
            yield from self.parent.around()

    def mark_blocks(self) -> None:
        """Find the blocks of this module and below."""
        blocks = [] if self.in_block else self._blocks()
        for child in self.children:
            child.in_block = self.in_block or child in blocks
            child.mark_blocks()

    def _blocks(self) -> list[Node]:
        inner = [child for child in self.children if not any(p.is_linear for p in child.places)]
        if _NO_BLOCKS.fullmatch(self.name):
            return []
        if self.is_container and _BLOCKS.fullmatch(self.name):
            return inner
        rows, blocks = defaultdict[str, list[Node]](list), list[Node]()
        for child in inner:
            stem = "." if self.is_container else re.sub(r"_\d+$", "", child.name)
            if (child.linears or child.num_experts) and stem != child.name:
                rows[stem].append(child)
        for stem, row in rows.items():
            most = max(Counter(type(child.module) for child in row).values())
            # A lone element is a block if a linear module (o, i) below meets one (i, o).
            sizes = Counter((place.outputs, place.inputs) for place in row[0].linears)
            is_closed = any(sizes[i, o] > (o == i) for o, i in sizes)
            is_lone = stem == "." and self.parent is not None and len(row) == 1
            blocks += row if most > 1 or (is_lone and is_closed) else []
        return blocks


def read_tree(model: nn.Module | Sequence[nn.Module]) -> list[Place]:
    """Read the places of all parameters; a tied parameter has its first name.

    Args:
        model: Module, or several.

    Raises:
        ValueError: No module, or FSDP1, which hides the matrices.
    """
    places: dict[nn.Parameter, Place] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str, node: Node) -> None:
        visited.add(module)
        kinds = {kind.__name__ for kind in type(module).__mro__}
        expected = "fully_shard (FSDP1 flattens the matrices)"
        is_fsdp1 = "FullyShardedDataParallel" in kinds
        require(not is_fsdp1, "model", f"FullyShardedDataParallel at {prefix!r}", expected)
        for field, parameter in module.named_parameters(recurse=False):
            name = clean_name(prefix + field)
            place = places.setdefault(parameter, Place(name, parameter, node))
            place.is_embedding |= isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            if place.node is node:
                node.places.append(place)
        for name, child in module.named_children():
            if child in visited:
                continue
            if WRAPPER.fullmatch(name) or (name == "module" and _REPLICATED & kinds):
                node.module = child
                visit(child, prefix, node)
            elif name == "parametrizations" or prefix.endswith("parametrizations."):
                visit(child, f"{prefix}{name}.", node)
            else:
                inner = Node(name, child, node)
                node.children.append(inner)
                visit(child, f"{prefix}{name}.", inner)

    for part in [model] if isinstance(model, nn.Module) else model:
        expected = "a module or a list of modules: param_groups(model), not model.parameters()"
        require(isinstance(part, nn.Module), "model", f"a {type(part).__name__}", expected)
        root = Node("", part, None)
        visit(part, "", root)
        root.mark_blocks()
    return list(places.values())


def _numbers_of_heads(values: Mapping[str, Any]) -> frozenset[int]:
    numbers = {n for field, n in values.items() if _NUMBER_OF_HEADS.fullmatch(field)}
    return frozenset(n for n in numbers if type(n) is int and n > 0)


def _read(fields: Mapping[str, Any]) -> Heads | None:
    def sizes(*names: str) -> list[int]:
        numbers = [n for name in names if isinstance(n := fields.get(name), int) and n > 0]
        return numbers if len(numbers) == len(names) else []

    if latent := sizes("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        content, rotary, value = latent
        return Heads(content + rotary, content, value)
    pairs = ("head_k_dim", "head_v_dim"), ("key_head_dim", "value_head_dim"), ("key_dim", "val_dim")
    for names in pairs:
        if linear := sizes(*names):
            return Heads(linear[0], *linear)
    size = sizes("head_dim")
    return Heads(*size * 3) if size else None
