"""The tree of modules: each parameter with its place, and the facts that the modules there give."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from amo_dist.config import require
from amo_dist.operators.names import known_type
from amo_dist.operators.patterns import WRAPPERS, Target, clean_name

# Fields with the width of a model, and with the number of heads that share it.
_WIDTHS = ("hidden_size", "embed_dim", "n_embd", "d_model", "dim")
_NUMBERS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_NUMBER_OF_HEADS = re.compile(
    r"(?:num_|n_|\w*coder_)?(?:local_)?"
    r"(?:(?:attn|attention|query|q|value|v|key_value|key|kv|k)_)?n?heads?|\w*query_groups"
)
_NUMBER_OF_EXPERTS = re.compile(r"(?:moe_)?(?:num|n)?_?(?:local_|routed_|total_)?experts?(?:_num)?")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Containers whose only element is a block, too, and those whose elements never are.
_BLOCKS = re.compile(r"\w*(?:layers?|blocks?)|h|layer\d|stages?|conformer")
_NO_BLOCKS = re.compile(r"\w*(?:head|embed|classifier|hypernetworks_mlp|prediction)s?")
_NUMBERED = re.compile(r"(\w+)_\d+")
# Wrappers that call their only inner module ``module``.
_REPLICATED = {"DistributedDataParallel", "DataParallel"}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Rows per head in each projection of an attention; all 0 if no module says.

    Attributes:
        query: Rows of a query head.
        key: Rows of a key head; in latent attention those without rotary positions.
        value: Rows of a value head.
        rotary: Rows at the end of each query head that rotate with the position. Above 0 in latent
            attention alone, where all heads share the rotary keys.
    """

    query: int = 0
    key: int = 0
    value: int = 0
    rotary: int = 0


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
    """

    name: str
    parameter: nn.Parameter
    node: Node
    is_embedding: bool = False
    kind: str | None = None
    target: Target = None
    reason: str = ""

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

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Fields of the module's own configuration."""
        config = vars(self.module).get("config")
        return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})

    @cached_property
    def heads(self) -> Heads:
        """Rows per head that the nearest module around gives."""
        heads = _read(vars(self.module)) or _read(self.values)
        return heads or (self.parent.heads if self.parent else Heads())

    @cached_property
    def num_heads(self) -> frozenset[int]:
        """Numbers of heads that the nearest module around gives."""
        for values in (vars(self.module), self.values):
            if numbers := _numbers(values, _NUMBER_OF_HEADS):
                return numbers
        return self.parent.num_heads if self.parent else frozenset()

    @cached_property
    def num_experts(self) -> frozenset[int]:
        """Numbers of experts that the module says or directly holds."""
        numbers = set(_numbers(vars(self.module), _NUMBER_OF_EXPERTS))
        inner = [self, *self.children]
        inner += [node for child in self.children for node in child.children]
        numbers |= {place.shape[0] for node in inner for place in node.places if place.is_stack}
        for child in self.children:
            counts = Counter(type(element.module) for element in child.children if element.linears)
            numbers |= {max(counts.values())} if counts and child.is_container else set()
        return frozenset(numbers - {1})

    @property
    def is_container(self) -> bool:
        """Whether the module is a list of others."""
        names = [child.name for child in self.children] or ["none"]
        return isinstance(self.module, _CONTAINERS) or all(map(str.isdigit, names))

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
        for child in () if self.in_block else self._blocks():
            child.in_block = True
        own = [place for child in self.children for place in child.places]
        self.in_block |= any(known_type(place.name, in_block=False) for place in own)
        for child in self.children:
            child.in_block |= self.in_block
            child.mark_blocks()

    def _blocks(self) -> list[Node]:
        inner = [child for child in self.children if not any(p.is_linear for p in child.places)]
        if self.is_container and _BLOCKS.fullmatch(self.name):
            return inner
        rows, blocks = defaultdict[str, list[Node]](list), list[Node]()
        for child in () if _NO_BLOCKS.fullmatch(self.name) else inner:
            match = _NUMBERED.fullmatch(child.name)
            if (self.is_container or match) and child.has_matrices and not child._is_model:
                rows["" if self.is_container or not match else match[1]].append(child)
        for stem, row in rows.items():
            most = max(Counter(type(child.module) for child in row).values())
            is_lone = not stem and self.parent is not None and len(row) == 1 and row[0]._is_closed
            blocks += row if most > 1 or is_lone else []
        return blocks

    @cached_property
    def has_matrices(self) -> bool:
        """Whether linear modules or stacks of matrices stand here or below."""
        own = any(place.is_linear or place.is_stack for place in self.places)
        return own or any(child.has_matrices for child in self.children)

    @property
    def _is_model(self) -> bool:
        """Whether embeddings and lists of others stand below, as in a whole model."""
        kinds = [type(module) for module in self.module.modules()]
        return nn.Embedding in kinds and nn.ModuleList in kinds

    @property
    def _is_closed(self) -> bool:
        """Whether a linear module (o, i) below meets one (i, o)."""
        counts = Counter((place.outputs, place.inputs) for place in self.linears)
        return any(counts[i, o] > (o == i) for o, i in counts)


def read_tree(parts: Sequence[nn.Module]) -> list[Place]:
    """Read the places of all parameters; a tied parameter has its first name.

    Args:
        parts: Modules of the model.

    Raises:
        ValueError: FSDP1, which hides the matrices.
    """
    places: dict[nn.Parameter, Place] = {}
    names: dict[str, nn.Parameter] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str, node: Node) -> None:
        visited.add(module)
        kinds = {kind.__name__ for kind in type(module).__mro__}
        value = f"FullyShardedDataParallel at {prefix!r}"
        expected = "fully_shard (FSDP1 flattens the matrices)"
        require("FullyShardedDataParallel" not in kinds, "model", value, expected)
        is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for field, parameter in module.named_parameters(recurse=False):
            name = clean_name(prefix + field)
            if names.setdefault(name, parameter) is not parameter:
                name = clean_name(prefix + field, keeps_copies=True)
            place = places.setdefault(parameter, Place(name, parameter, node))
            place.is_embedding |= is_table
            if place.node is node:
                node.places.append(place)
        for name, child in module.named_children():
            if child in visited:
                continue
            inner, path = node, f"{prefix}{name}."
            if name == "module" and _REPLICATED & kinds:
                node.module, path = child, prefix
            elif name in WRAPPERS:
                node.module = child
            elif name != "parametrizations" and not prefix.endswith("parametrizations."):
                inner = Node(name, child, node)
                node.children.append(inner)
            visit(child, path, inner)

    roots = [Node("", part, None) for part in parts]
    for root in roots:
        visit(root.module, "", root)
        root.mark_blocks()
    return list(places.values())


def _numbers(values: Mapping[str, Any], fields: re.Pattern[str]) -> frozenset[int]:
    return frozenset(
        n for f, n in values.items() if fields.fullmatch(f) and type(n) is int and n > 1
    )


def _read(values: Mapping[str, Any]) -> Heads | None:
    def sizes(*fields: str) -> list[int] | None:
        numbers = [values.get(field) for field in fields]
        is_valid = all(isinstance(number, int) and number > 0 for number in numbers)
        return numbers if is_valid else None  # type: ignore[return-value]

    if latent := sizes("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        content, rotary, value = latent
        return Heads(content + rotary, content, value, rotary)
    for fields in (("head_k_dim", "head_v_dim"), ("key_head_dim", "value_head_dim")):
        if linear := sizes(*fields):
            return Heads(linear[0], linear[0], linear[1])
    for field in ("head_dim", "attention_head_size", "key_value_proj_dim"):
        if size := sizes(field):
            return Heads(*size * 3)
    for fields in itertools.product(_WIDTHS, _NUMBERS):
        if (shared := sizes(*fields)) and shared[0] % shared[1] == 0:
            return Heads(*[shared[0] // shared[1]] * 3)
    return None
