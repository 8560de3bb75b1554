"""The values of the inter-operator IR: spaces, maps between them, operators, and programs with their printed form."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from dejax.pallas.lowering.identity import identity_of


class Space(enum.StrEnum):
    """What the rows of a value stand for."""

    NODE = "node"
    EDGE = "edge"
    SOURCE_PAIR = "source_pair"  # unique (sender, edge type)
    DESTINATION_PAIR = "destination_pair"  # unique (receiver, edge type)
    EDGE_TYPE = "edge_type"
    NODE_TYPE = "node_type"
    GRAPH = "graph"  # one row, shared by all


@dataclass(frozen=True, slots=True)
class Via:
    """A map from each row of a space `fine` to one row of a space `coarse`, as from an edge to its source node.

    Attributes:
      fine: the space whose rows are mapped; None for the map of any space to the whole graph.
      coarse: the space that the map leads to.
    """

    fine: Space | None  # None: any space
    coarse: Space


VIAS: dict[str, Via] = {
    "src": Via(Space.EDGE, Space.NODE),
    "dst": Via(Space.EDGE, Space.NODE),
    "source_pair": Via(Space.EDGE, Space.SOURCE_PAIR),
    "destination_pair": Via(Space.EDGE, Space.DESTINATION_PAIR),
    "etype": Via(Space.EDGE, Space.EDGE_TYPE),
    "source_pair.node": Via(Space.SOURCE_PAIR, Space.NODE),
    "source_pair.etype": Via(Space.SOURCE_PAIR, Space.EDGE_TYPE),
    "destination_pair.node": Via(Space.DESTINATION_PAIR, Space.NODE),
    "destination_pair.etype": Via(Space.DESTINATION_PAIR, Space.EDGE_TYPE),
    "ntype": Via(Space.NODE, Space.NODE_TYPE),
    "source_type": Via(Space.EDGE_TYPE, Space.NODE_TYPE),  # where all sources of an edge type have one node type
    "all": Via(None, Space.GRAPH),
}
# Two steps that are one: (outer map, then inner map) -> map.
COMPOSED_VIAS = {
    ("source_pair", "source_pair.node"): "src",
    ("source_pair", "source_pair.etype"): "etype",
    ("destination_pair", "destination_pair.node"): "dst",
    ("destination_pair", "destination_pair.etype"): "etype",
}
# The map by which the rows of a space are typed: what a typed linear of that space is grouped by.
TYPE_VIA = {
    Space.EDGE: "etype",
    Space.SOURCE_PAIR: "source_pair.etype",
    Space.DESTINATION_PAIR: "destination_pair.etype",
    Space.NODE: "ntype",
}
TYPE_SPACES = (Space.EDGE_TYPE, Space.NODE_TYPE, Space.GRAPH)
"""Spaces of few rows: those of types, and the one of the graph."""


class IRError(ValueError):
    """Raised for an operator that breaks a rule of the IR."""


class Type(NamedTuple):
    """The type of a value: its space, and the shape and dtype of a row."""

    space: Space
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Op:
    """One operator and the type of the value that it defines.

    Attributes:
      name: the name of the operator, a key of `OPERATORS`.
      args: numbers of the values that it reads.
      attrs: its attributes, pairs of a name and a value sorted by name.
      space: what the rows of its value stand for.
      shape: the feature shape of one row.
      dtype: the dtype of the elements.
    """

    name: str
    args: tuple[int, ...]
    attrs: tuple[tuple[str, Any], ...]
    space: Space
    shape: tuple[int, ...]
    dtype: str

    def attr(self, key: str, default: Any = None) -> Any:
        """The attribute `key`, or `default` for an operator without it."""
        return dict(self.attrs).get(key, default)

    @property
    def width(self) -> int:
        """Number of elements in one row."""
        return math.prod(self.shape)

    @property
    def is_sum(self) -> bool:
        """Whether the operator sums rows along a map."""
        return self.name == "reduce" and self.attr("op") == "sum"

    @property
    def is_extremum(self) -> bool:
        """Whether the operator takes the maximum or minimum of rows, along a map or by integers."""
        return self.name in ("reduce", "place") and self.attr("op") in ("max", "min")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the value."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def type(self) -> str:
        """The type of the value as text, such as `node[16] float32`."""
        return f"{self.space}[{', '.join(map(str, self.shape))}] {self.dtype}"


@dataclass(frozen=True)
class OpProgram:
    """A program of level 1: operators in order, where operator `i` defines value `i`, and the returned values.

    Attributes:
      name: the name of the program, for messages and profiles.
      ops: the operators.
      outputs: numbers of the values that the program returns.
      lines: for each operator the user's source line, or None where it is not known.
    """

    name: str
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    lines: tuple[str | None, ...] = field(default=(), compare=False)  # the user's line of each operator, where known
    # Set by `verify`, which then returns at once.
    is_verified: bool = field(default=False, init=False, compare=False, repr=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.ops, self.outputs))

    def __hash__(self) -> int:  # programs are keys of the compilation cache: hash once
        return self._hash

    @cached_property
    def _identity(self) -> str:
        return identity_of(self.ops, self.outputs)

    def identity(self) -> str:
        """What tells kernels of this program from those of others: its operators, which several kernels share."""
        return self._identity

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the `input` operators, in the order of the arguments that they stand for."""
        found = [i for i, op in enumerate(self.ops) if op.name == "input"]
        return tuple(sorted(found, key=lambda i: self.ops[i].attr("position")))

    def by_position(self) -> dict[int, int]:
        """For the position of each argument of a verified program, the number of its `input` operator."""
        return {self.ops[i].attr("position"): i for i in self.inputs}

    def users(self) -> list[list[int]]:
        """For each value, the numbers of the operators that read it."""
        users: list[list[int]] = [[] for _ in self.ops]
        for i, op in enumerate(self.ops):
            for a in dict.fromkeys(op.args):
                users[a].append(i)
        return users

    def __str__(self) -> str:
        return print_program(self)


def format_op(index: int, op: Op) -> str:
    """One line of the printed form, without the type."""
    if op.name == "input":
        return f"%{index} = input<{op.attr('name')}>"
    if op.name == "const":
        return f"%{index} = const {op.attr('value'):g}"
    attrs = dict(op.attrs)
    if op.name in ("gather", "cast", "outer", "count"):  # said by the type
        attrs.pop("space", None), attrs.pop("dtype", None)
    words = [op.name, *(f"%{a}" for a in op.args), *(f"{k}={_short(v)}" for k, v in sorted(attrs.items()))]
    return f"%{index} = {' '.join(words)}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_short, value)) + ")"
    return str(value)


def print_program(program: OpProgram) -> str:
    """The program as text: one operator a line, its type in a second column."""
    left = [format_op(i, op) for i, op in enumerate(program.ops)]
    margin = min(max((len(s) for s in left), default=0), 56)
    lines = [f"{s:<{margin}} : {op.type}" for s, op in zip(left, program.ops, strict=True)]
    return "\n".join([f"{program.name}:", *lines, f"return {', '.join(f'%{o}' for o in program.outputs)}"])
