"""Programs drawn from the grammar of the front end, as Python source: a failing one is printed and can be run by hand.

The grammar is a table, `PRODUCTIONS`. A production is a function of a `Drawing` that adds lines to the program;
`@production(weight=...)` puts it into the table. Patterns with holes for operands stand in `UNARY`, `BINARY` and
`FEATURES`. To add an operator, add a pattern or write a production.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from dejax import rgnn
from tests.rgnn.contract import row_counts
from tests.rgnn.strategies import EdgeList

Shape = tuple[int, ...]
# For each space, the front end's method for an argument, and the spaces whose values may be combined with it.
_DECLARE = {
    "node": "node",
    "edge": "edge",
    "source_pair": "source_pair",
    "etype": "per_edge_type",
    "ntype": "per_node_type",
    "shared": "shared",
}
_TYPED_BY = {
    "edge": "etype",
    "source_pair": "etype",
    "node": "ntype",
    "etype": "etype",
    "ntype": "ntype",
    "shared": "shared",
}


# Feature shapes of new arguments: ranks 0 to 2, unit axes at every place.
def shapes(width: int) -> tuple[Shape, ...]:
    return (width,), (2, width), (), (1,), (2, 1), (1, width), (1, 1)


@dataclass(frozen=True)
class Pattern:
    """Source with a placeholder for each operand.

    `smooth` means that neither it nor its gradient jumps, so that runs in 16 bits can be compared.
    """

    text: str
    smooth: bool = True


# Functions whose values and slopes stay small. Functions with a kink are moved away from 0, which many rows hold.
UNARY: list[Pattern] = [
    Pattern("rgnn.tanh({})"),
    Pattern("rgnn.sigmoid({})"),
    Pattern("rgnn.erf({})"),
    Pattern("rgnn.silu({})"),
    Pattern("rgnn.gelu({})"),
    Pattern("rgnn.exp(rgnn.tanh({}))"),
    Pattern("rgnn.log(1.5 + rgnn.square({}))"),
    Pattern("rgnn.sqrt(1.5 + rgnn.square({}))"),
    Pattern("rgnn.rsqrt(1.5 + rgnn.square({}))"),
    Pattern("rgnn.reciprocal(1.5 + rgnn.square({}))"),
    Pattern("rgnn.relu({} + 0.123)", smooth=False),
    Pattern("rgnn.leaky_relu({} - 0.123)", smooth=False),
    Pattern("rgnn.elu({} + 0.321)", smooth=False),
    Pattern("rgnn.abs({} + 0.213)", smooth=False),
    Pattern("rgnn.square(rgnn.tanh({}))"),
    Pattern("rgnn.tanh({}) ** 3"),
    Pattern("-{}"),
    Pattern("0.7 * {}"),
    Pattern("rgnn.stop_gradient({})"),
    Pattern("rgnn.sin({})"),
    Pattern("rgnn.cos({})"),
    Pattern("rgnn.softplus({})"),
    Pattern("rgnn.expm1(rgnn.tanh({}))"),
    Pattern("rgnn.log1p(rgnn.square({}))"),
    Pattern("2 ** rgnn.tanh({})"),
    Pattern("abs({} + 0.217)", smooth=False),
    Pattern("rgnn.clip({}, -0.613, 0.577)", smooth=False),
    Pattern("{} * np.float32(0.5)"),
    Pattern("{} + np.array(0.25)"),
]
# Functions of two values that broadcast; the second has the shape of the first, or unit axes, or is a scalar.
BINARY: list[Pattern] = [
    Pattern("{} * {}"),
    Pattern("{} + {}"),
    Pattern("{} - {}"),
    Pattern("{} / (1.5 + rgnn.square({}))"),
    Pattern("rgnn.maximum({}, {} + 0.123)", smooth=False),
    Pattern("rgnn.minimum({} * 0.9, {})", smooth=False),
    Pattern("rgnn.where_positive({0} + 0.123, {1}, {0})", smooth=False),
    Pattern("rgnn.arctan2({}, 1.5 + rgnn.square({}))"),
    Pattern("(1.5 + rgnn.square({})) ** rgnn.tanh({})"),
    Pattern("rgnn.where(({0} > 0.123) & ({1} < 0.321), {0}, {1})", smooth=False),
    Pattern("rgnn.where(({0} >= 0.123) | ~({1} > 0.321), 0.7, {0})", smooth=False),
]


def _reshaped(shape: Shape) -> list[tuple[str, Shape]]:
    width = math.prod(shape)
    return [
        ("{}.reshape(-1)", (width,)),
        ("{}.reshape(-1, 1)", (width, 1)),
        ("{}.reshape(1, -1)", (1, width)),
        ("{}[None]", (1, *shape)),
        ("{}[..., None]", (*shape, 1)),
        ("{}[:, None]", (*shape[:1], 1, *shape[1:])),
    ]


def _summed(shape: Shape) -> list[tuple[str, Shape]]:
    found: list[tuple[str, Shape]] = []
    for axis in range(len(shape)):
        rest, kept = (*shape[:axis], *shape[axis + 1 :]), (*shape[:axis], 1, *shape[axis + 1 :])
        for how in ("sum", "mean"):
            found += [(f"{{}}.{how}({axis})", rest), (f"{{}}.{how}({axis}, keepdims=True)", kept)]
    return found


def _over_axes(shape: Shape) -> list[tuple[str, Shape]]:
    """Sums over all axes, and smooth functions of exponentials."""
    found: list[tuple[str, Shape]] = [
        ("{}.sum(axis=None)", ()),
        ("{}.mean(None, keepdims=True)", tuple(1 for _ in shape)),
        ("rgnn.logsumexp({}, axis=None)", ()),
        ("{}.softmax(axis=None)", shape),
        ("{}.T", shape[::-1]),
    ]
    for axis in range(len(shape)):
        rest, kept = (*shape[:axis], *shape[axis + 1 :]), (*shape[:axis], 1, *shape[axis + 1 :])
        found += [
            (f"rgnn.softmax({{}}, {axis})", shape),
            (f"rgnn.log_softmax({{}}, {axis})", shape),
            (f"{{}}.logsumexp(({axis},))", rest),
            (f"rgnn.logsumexp({{}}, {axis}, keepdims=True)", kept),
        ]
    return found


# From a feature shape of one or two axes to (pattern, shape of the result). Results of more axes are left out.
FEATURES: list[Callable[[Shape], list[tuple[str, Shape]]]] = [_reshaped, _summed, _over_axes]


@dataclass(frozen=True)
class Value:
    name: str
    space: str
    shape: Shape
    dtype: str = "float"


@dataclass(frozen=True)
class Input:
    """An array argument.

    Attributes:
      kind: of its rows.
      shape: of a row.
      scale: standard deviation.
      offset: mean.
      spread: columns (the last axis) are multiplied by 10 to powers between plus and minus this.
      values: "normal"; "mask", 1 or -1; "below n", whole numbers; or "whole", those of an integer dtype, whose products
        and sums wrap around.
      dtype: of the array; "" for that of the run.
    """

    kind: str
    shape: Shape
    scale: float = 1.0
    offset: float = 0.0
    spread: float = 0.0
    values: str = "normal"
    dtype: str = ""

    def __str__(self) -> str:
        more = f" + {self.offset}" if self.offset else ""
        more += f", columns x 10^+-{self.spread}" if self.spread else ""
        return f"{self.kind} {self.shape} {self.values} x {self.scale:.3g}{more} {self.dtype}".rstrip()

    def make(self, rng: np.random.Generator, rows: dict[str, int]) -> np.ndarray:
        shape = self.shape if self.kind == "shared" else (rows[self.kind], *self.shape)
        if self.values.startswith("below"):
            return rng.integers(0, int(self.values.split()[1]), shape)
        if self.values == "whole":
            return rng.integers(-11 if self.dtype.startswith("int") else 0, 12, shape, self.dtype)
        if self.values == "mask":
            return np.where(rng.random(shape) < 0.5, 1.0, -1.0)
        x = rng.normal(size=shape) * self.scale + self.offset
        if self.spread and self.shape:
            x = x * 10 ** rng.uniform(-self.spread, self.spread, self.shape[-1])
        # As floating-point numbers of every dtype that is compared.
        return x.astype(jnp.dtype(self.dtype)).astype(np.float64) if self.dtype else x


@dataclass(frozen=True)
class Recipe:
    """A program as source, with its arrays."""

    lines: tuple[str, ...]
    inputs: tuple[Input, ...]
    returns: tuple[str, ...]

    def __repr__(self) -> str:
        shapes = "".join(f"\n# a[{i}]: {spec}" for i, spec in enumerate(self.inputs))
        return f"{shapes}\n{self.source}"

    @property
    def source(self) -> str:
        body = [*self.lines, f"return {', '.join(self.returns)},"]
        return "def drawn(g, a):\n" + "\n".join(f"    {line}" for line in body)

    @property
    def scaled(self) -> bool:
        """Whether columns differ in scale or have a mean, so that each is compared separately."""
        return any(i.spread or i.offset for i in self.inputs)

    def program(self) -> Any:
        scope: dict[str, Any] = {"rgnn": rgnn, "inf": math.inf, "np": np}
        exec(self.source, scope)
        return rgnn.program(scope["drawn"])

    def arrays(self, edges: EdgeList) -> list[np.ndarray]:
        """The arrays in float64 (integers in int64), rounded to their dtypes."""
        rng, rows = np.random.default_rng(len(self.lines)), row_counts(edges)
        return [spec.make(rng, rows) for spec in self.inputs]

    def cast(self, arrays: Sequence[np.ndarray], dtype: str) -> list[Any]:
        """The arrays for a run in `dtype`; in float64 all floats are float64."""
        found = []
        for x, spec in zip(arrays, self.inputs, strict=True):
            kinds = {"below": "int32", "whole": spec.dtype}
            narrow = spec.dtype if spec.dtype and dtype != "float64" else dtype
            chosen = kinds.get(spec.values.split()[0], narrow)
            found.append(jnp.asarray(x.astype(jnp.dtype(chosen))))  # jax compiles a cast
        return found


class Drawing:
    """A program under construction.

    Attributes:
      draw: hypothesis' own; `one_of` draws an item of a sequence.
      narrow: "float16" or "bfloat16" where some arguments are to be of 16 bits, else "". Only smooth patterns may then
        be drawn, since a rounded operand may fall on the other side of a kink.
      spread: of columns, see `Input`.
      offset: whether arguments may have a mean.
      width: the last axis of most arguments that have one.
      whole: whether some arguments are integers.
    """

    def __init__(
        self,
        draw: st.DrawFn,
        narrow: str = "",
        spread: float = 0.0,
        offset: bool = False,
        width: int = 3,
        whole: bool = False,
    ) -> None:
        self.draw, self.narrow, self.spread, self.offset, self.width = draw, narrow, spread, offset, width
        self.whole = whole
        self.lines: list[str] = []
        self.inputs: list[Input] = []
        self.pool: list[Value] = []

    def one_of(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(tuple(items)))

    def maybe(self) -> bool:
        return bool(self.draw(st.booleans()))

    def pattern(self, table: Sequence[Pattern]) -> str:
        """The text of a pattern; a smooth one where 16-bit dtypes are compared."""
        return str(self.one_of([p for p in table if p.smooth or not self.narrow]).text)

    def define(self, expression: str, space: str, shape: Shape, dtype: str = "float") -> Value:
        value = Value(f"v{len(self.pool)}", space, shape, dtype)
        self.lines.append(f"{value.name} = {expression}")
        self.pool.append(value)
        return value

    def argument(self, kind: str, shape: Shape, scale: float = 1.0, values: str = "normal") -> Value:
        """A new declared argument; "normal" values may be narrow and have column scales and an offset."""
        plain = values == "normal"
        offset = self.one_of((0.0, 0.0, 1.0, 5.0)) if plain and self.offset else 0.0
        spread = self.spread if plain and self.spread and self.maybe() else 0.0
        dtype = self.narrow if plain and self.narrow and self.one_of((True, True, False)) else ""
        if plain and self.whole and self.maybe():
            values, dtype = "whole", self.one_of(("int8", "uint8", "int32"))
        self.inputs.append(Input(kind, shape, scale, offset * scale, spread, values, dtype))
        number = "int" if values.startswith("below") else "float"
        return self.define(f"g.{_DECLARE[kind]}(a[{len(self.inputs) - 1}])", kind, shape, number)

    def pick(self, suits: Callable[[Value], bool], dtype: str = "float") -> Value | None:
        # The latest value first: hypothesis shrinks towards it, which keeps chains long.
        found = [v for v in reversed(self.pool) if v.dtype == dtype and suits(v)]
        return self.one_of(found) if found else None

    def node(self) -> Value:
        return self.pick(lambda v: v.space == "node") or self.argument(
            "node", self.one_of(((self.width,), (2, self.width), ()))
        )

    def edge(self) -> Value:
        return self.pick(lambda v: v.space == "edge") or read(self)

    def any(self) -> Value:
        return self.pick(lambda v: v.space in ("node", "edge")) or self.node()

    def wide(self, axes: int = 1) -> Value:
        """A value with a feature axis."""
        return self.pick(lambda v: len(v.shape) in (1, 2)) or self.argument("node", (2, self.width)[-axes:])

    def partner(self, x: Value, shapes: Sequence[Shape]) -> Value:
        """Another value to combine with `x`: of its space, by type, or shared."""
        spaces = (x.space, *((_TYPED_BY[x.space], "shared") if x.space != "shared" else ()))
        suits = lambda v: v is not x and v.space in spaces and v.shape in shapes  # noqa: E731
        found = self.pick(suits) if self.maybe() else None
        return found or self.argument(self.one_of(spaces), self.one_of(shapes))


# --- the table -------------------------------------------------------------------------------------------------------

Step = Callable[[Drawing], Any]
# The relative frequency of each function.
PRODUCTIONS: dict[Step, int] = {}


def production(weight: int = 1) -> Callable[[Step], Step]:
    """Adds a function to the table."""

    def put(step: Step) -> Step:
        PRODUCTIONS[step] = weight
        return step

    return put


@production(2)
def read(d: Drawing) -> Value:
    value = d.pick(lambda v: v.space in ("node", "ntype")) or d.node()
    return d.define(f"g.{d.one_of(('src', 'dst'))}({value.name})", "edge", value.shape)


@production()
def read_pair(d: Drawing) -> Value:
    value = d.pick(lambda v: v.space == "source_pair") or d.argument("source_pair", (d.width,))
    return d.define(f"g.src({value.name})", "edge", value.shape)


@production()
def new_argument(d: Drawing) -> Value:
    return d.argument(d.one_of(tuple(_DECLARE)), d.one_of(shapes(d.width)))


@production(3)
def linear(d: Drawing) -> Value:
    x = d.wide()
    kind = d.one_of((_TYPED_BY[x.space], "shared"))
    k, n = x.shape[-1], d.one_of((1, 2, d.width))
    heads = x.shape[0] if len(x.shape) == 2 else d.one_of((1, 2, 3))
    same = kind == x.space  # rows of types times weights of types: no heads with a matrix of two axes
    shape = (heads, k, n) if d.maybe() and not (same and len(x.shape) == 2) else (k, n)
    w = d.pick(lambda v: v.space == kind and v.shape == shape and v is not x) if d.maybe() else None
    w = w or d.argument(kind, shape, k**-0.5)
    out: Shape = (heads, n) if len(shape) == 3 or len(x.shape) == 2 else (n,)
    return d.define(f"{x.name} @ {w.name}", x.space, out)


@production()
def dot(d: Drawing) -> Value:
    x = d.wide()
    y = d.partner(x, (x.shape,))
    return d.define(f"rgnn.dot({x.name}, {y.name})", x.space, x.shape[:-1])


@production(2)
def binary(d: Drawing) -> Value:
    x = d.any()
    broadcast = tuple(2 if size == 1 else size for size in x.shape)
    units = [tuple(1 if i == axis else size for i, size in enumerate(x.shape)) for axis in range(len(x.shape))]
    shapes = ((), x.shape, tuple(1 for _ in x.shape), *units, (*x.shape[:-1], *broadcast[-1:]), broadcast)
    y = d.partner(x, tuple(dict.fromkeys(shapes)))
    names = (x.name, y.name)
    if d.maybe() and y.space == x.space and y.shape == x.shape:
        names = names[::-1]
    shape = np.broadcast_shapes(x.shape, y.shape)
    return d.define(d.pattern(BINARY).format(*names), x.space, tuple(map(int, shape)))


@production()
def unary(d: Drawing) -> Value:
    x = d.any()
    return d.define(d.pattern(UNARY).format(x.name), x.space, x.shape)


@production(2)
def features(d: Drawing) -> Value:
    x = d.wide(2)
    choices = [c for made in FEATURES for c in made(x.shape) if len(c[1]) <= 2]
    pattern, shape = d.one_of(choices)
    return d.define(pattern.format(x.name), x.space, shape)


@production()
def part(d: Drawing) -> Value:
    """A slice, or one index, of a feature axis."""
    x = d.wide(2)
    axis = d.draw(st.integers(0, len(x.shape) - 1))
    start = d.draw(st.integers(0, x.shape[axis] - 1))
    stop = d.draw(st.integers(start + 1, x.shape[axis]))
    colons = ":, " * axis
    if d.maybe():
        return d.define(f"{x.name}[{colons}{start}]", x.space, (*x.shape[:axis], *x.shape[axis + 1 :]))
    shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
    return d.define(f"{x.name}[{colons}{start}:{stop}]", x.space, shape)


@production()
def concatenate(d: Drawing) -> Value:
    x = d.wide()
    axis = d.draw(st.integers(0, len(x.shape) - 1))
    sized = lambda n: (*x.shape[:axis], n, *x.shape[axis + 1 :])  # noqa: E731
    y = d.partner(x, (x.shape, sized(2), sized(1)))
    names = ", ".join(d.one_of(((x.name, y.name), (y.name, x.name))))
    return d.define(f"rgnn.concatenate([{names}], {axis})", x.space, sized(x.shape[axis] + y.shape[axis]))


@production()
def softmax(d: Drawing) -> Value:
    x = d.edge()
    return d.define(f"rgnn.edge_softmax({x.name}, within={d.one_of(('dst', 'src', 'relation'))!r})", "edge", x.shape)


@production()
def softmax_over_rows(d: Drawing) -> Value:
    x = d.any()
    return d.define(f"rgnn.row_softmax({x.name}, within={d.one_of(('graph', 'type'))!r})", x.space, x.shape)


@production()
def extremum_of_features(d: Drawing) -> Value:
    """Adds different offsets to the columns, so that a row of zeros has no ties for its maximum."""
    x = d.wide(2)
    how, axis = d.one_of(("max", "min")), d.draw(st.integers(0, len(x.shape) - 1))
    apart = f"{x.name} + np.linspace(-1, 1, {math.prod(x.shape)}).reshape({x.shape})"
    largest = f"({apart}).{how}({axis})"
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return d.define(f"rgnn.stop_gradient({largest})" if d.narrow else largest, x.space, shape)


@production()
def to_types_and_back(d: Drawing) -> Value:
    """A reduction to types or to the graph, which rows then read."""
    x = d.any()
    how = d.one_of(("sum", "mean", "max", "min"))
    to = d.one_of(("graph", "node_type" if x.space == "node" else "edge_type"))
    total = f"g.{how}_to_{to}({x.name})"
    total = f"rgnn.stop_gradient({total})" if how in ("max", "min") and d.narrow else total
    return d.define(f"{x.name} - rgnn.tanh({total})", x.space, x.shape)


@production()
def readout_and_back(d: Drawing) -> Value:
    """A reduction by integers, some out of range, which rows then read."""
    x = d.any()
    ids = d.argument(x.space, (), values="below 5")
    how = d.one_of(("sum", "mean", "max", "min"))
    pooled = f"g.{how}_by({x.name}, {ids.name}, {d.one_of((1, 3, 5))})"
    pooled = f"rgnn.stop_gradient({pooled})" if how in ("max", "min") and d.narrow else pooled
    return d.define(f"{x.name} + rgnn.tanh({pooled})[{ids.name}]", x.space, x.shape)


@production(2)
def lookup(d: Drawing) -> Value:
    """A lookup in a shared table or in the table of each row's type, by an integer that may be out of range."""
    space = d.one_of(("node", "edge"))
    ids = d.argument(space, (), values="below 4")
    table = d.argument(d.one_of((_TYPED_BY[space], "shared")), (3, *d.one_of(((d.width,), (2, d.width), ()))))
    d.pool[-1] = replace(table, dtype="table")  # of an axis more than others can take
    return d.define(f"{table.name}[{ids.name} - {d.one_of((0, 1))}]", space, table.shape[1:])


@production()
def product(d: Drawing) -> Value:
    """A product over edges, of values near 1 and some zeros."""
    x, to = d.edge(), d.one_of(("dst", "src"))
    mask = d.argument("edge", (), values="mask")
    rows = f"rgnn.where({mask.name} > 0, 0.5 + rgnn.sigmoid({x.name}), rgnn.tanh({x.name}))"
    return d.define(f"g.prod_to_{to}({rows})", "node", x.shape)


@production()
def vector(d: Drawing) -> Value:
    x = d.wide()
    y = d.argument(d.one_of((_TYPED_BY[x.space], "shared")), x.shape[-1:], x.shape[-1] ** -0.5)
    return d.define(f"{x.name} @ {y.name}", x.space, x.shape[:-1])


def _masked(d: Drawing, x: Value) -> str:
    """`x` with -inf at some of its rows, at all rows of some nodes and edge types."""
    kind = d.one_of(("edge", "node", "etype"))
    mask = d.argument(kind, d.one_of(((), x.shape)), values="mask")
    read = f"g.{d.one_of(('src', 'dst'))}({mask.name})" if kind == "node" else mask.name
    return f"rgnn.where_positive({read}, {x.name}, -inf)"


@production()
def masked_softmax(d: Drawing) -> Value:
    x = d.edge()
    return d.define(f"rgnn.edge_softmax({_masked(d, x)}, within={d.one_of(('dst', 'relation'))!r})", "edge", x.shape)


@production()
def masked_maximum(d: Drawing) -> Value:
    x = d.edge()
    largest = f"g.max_to_{d.one_of(('dst', 'src'))}({_masked(d, x)})"
    return d.define(f"rgnn.stop_gradient({largest})" if d.narrow else largest, "node", x.shape)


def _row(d: Drawing) -> Value:
    """An edge value of one axis, often read from nodes."""
    node = d.pick(lambda v: v.space == "node" and len(v.shape) == 1)
    if node is None or d.maybe():
        found = d.pick(lambda v: v.space == "edge" and len(v.shape) == 1)
        if found is not None:
            return found
    node = node or d.argument("node", (d.width,))
    return d.define(f"g.{d.one_of(('src', 'dst'))}({node.name})", "edge", node.shape)


@production(2)
def joined_rows(d: Drawing) -> Value:
    """Rows of both ends concatenated, which a product or elementwise work then reads."""
    parts = [_row(d) for _ in range(d.one_of((2, 2, 3)))]
    width = sum(p.shape[0] for p in parts)
    names = ", ".join(p.name for p in parts)
    x = d.define(f"rgnn.concatenate([{names}], {d.one_of((0, -1))})", "edge", (width,))
    how, kind = d.one_of(("product", "heads", "dot", "elementwise", "sum")), d.one_of(("etype", "shared"))
    if how == "sum":
        return d.define(f"{x.name}.sum(0)", "edge", ())
    shape = {"product": (width, 2), "heads": (2, width, 3)}.get(how, (width,))
    w = d.argument(kind, shape, width**-0.5)
    if how == "dot":
        return d.define(f"rgnn.dot({x.name}, {w.name})", "edge", ())
    if how == "elementwise":
        return d.define(f"rgnn.tanh({x.name} * {w.name})", "edge", (width,))
    return d.define(f"{x.name} @ {w.name}", "edge", (2,) if how == "product" else (2, 3))


@production()
def heads_of_rows(d: Drawing) -> Value:
    """A product whose rows, with a bias or without, are reshaped into heads."""
    x = d.pick(lambda v: v.space in ("node", "edge") and len(v.shape) == 1) or _row(d)
    kind, width = d.one_of((_TYPED_BY[x.space], "shared")), d.one_of((4, 6))
    w = d.argument(kind, (x.shape[0], d.one_of((width, width, 1))), x.shape[0] ** -0.5)
    rows = f"{x.name} @ {w.name}"
    if w.shape[1] == 1 or d.maybe():
        rows = f"({rows} + {d.argument(kind, (width,)).name})"
    rows = f"rgnn.tanh({rows})" if d.maybe() else rows
    rows = f"g.src({rows})" if x.space == "node" and d.maybe() else rows
    space = "edge" if rows.startswith("g.src") else x.space
    return d.define(f"({rows}).reshape(2, {width // 2})", space, (2, width // 2))


@production()
def two_products(d: Drawing) -> Value:
    """Two products with heads of the same rows, with biases or without, as keys and values of attention."""
    x, heads = _row(d), d.one_of((1, 2))
    made = []
    for bias in d.one_of((((), ()), ((heads, 3), (heads, 3)), ((1, 3), (heads, 1)), ((1, 3), (1, 3)))):
        w = d.argument("etype", (heads, x.shape[0], 3), x.shape[0] ** -0.5)
        added = f" + {d.argument('etype', bias).name}" if bias else ""
        made.append(d.define(f"{x.name} @ {w.name}{added}", "edge", (heads, 3)))
    key, value = made
    query = d.argument("etype", (heads, 3), 0.5)
    share = f"rgnn.edge_softmax(rgnn.dot({key.name}, {query.name}))"
    return d.define(f"g.sum_to_dst({share}[:, None] * {value.name})", "node", (heads, 3))


@production()
def shared_product_of_edges(d: Drawing) -> Value:
    """A sum over edges of a product that all share, with scalars or a bias."""
    x, n = _row(d), d.one_of((1, 2, 5))
    rows = f"{x.name} @ {d.argument('shared', (x.shape[0], n), x.shape[0] ** -0.5).name}"
    how = d.one_of(("plain", "bias", "scaled"))
    if how == "bias":
        rows = f"({rows} + {d.argument('shared', (n,)).name})"
    if how == "scaled":
        rows = f"{d.argument('edge', ()).name} * ({rows})"
    to = d.one_of(("sum_to_dst", "sum_to_src", "mean_to_dst"))
    return d.define(f"g.{to}({rows})", "node", (n,))


@production(3)
def reduce(d: Drawing) -> Value:
    x = d.edge()
    how, to = d.one_of(("sum", "mean", "max", "min")), d.one_of(("dst", "src"))
    total = f"g.{how}_to_{to}({x.name})"
    # 16-bit dtypes cannot tell which of two close values is larger and gets the gradient.
    closed = how in ("max", "min") and d.narrow
    return d.define(f"rgnn.stop_gradient({total})" if closed else total, "node", x.shape)


@production(3)
def attention(d: Drawing) -> Value:
    """A sum weighted by a softmax, which the compiler computes in one pass; scores have unit axes anywhere."""
    x = d.edge()
    shapes: list[Shape] = [(), x.shape[:1], x.shape]
    shapes += [tuple(1 if i == axis else size for i, size in enumerate(x.shape)) for axis in range(len(x.shape))]
    score = d.partner(x, tuple(dict.fromkeys(shapes)))
    if score.space == "shared":
        score = d.define(f"rgnn.rsqrt(g.out_degree()) * {score.name}", "edge", score.shape)
    elif score.space != "edge":
        score = d.define(f"{score.name} * g.in_degree()", "edge", score.shape)
    expression = _masked(d, score) if d.one_of((True, False, False)) else score.name
    axis = "[..., None]" if len(score.shape) == 1 == len(x.shape) - 1 else ""
    share = f"rgnn.edge_softmax({expression}, {d.one_of(('dst', 'relation'))!r}){axis}"
    how = d.one_of(("sum_to_dst", "sum_to_dst", "mean_to_dst", "sum_to_src"))
    return d.define(f"g.{how}({share} * {x.name})", "node", x.shape)


@production(2)
def scored(d: Drawing) -> Value:
    """Attention as it is usually written, with a score whose product or sum leaves a unit axis."""
    x = d.pick(lambda v: v.space == "edge" and len(v.shape) in (1, 2)) or d.define(
        f"g.src({d.argument('node', (d.width,)).name})", "edge", (d.width,)
    )
    unit = (*x.shape[:-1], 1)
    if d.maybe():
        w = d.argument(d.one_of(("etype", "shared")), (*x.shape, 1), x.shape[-1] ** -0.5)
        score = d.define(f"{x.name} @ {w.name}", "edge", unit)
    else:
        a = d.argument(d.one_of(("etype", "shared")), x.shape, x.shape[-1] ** -0.5)
        score = d.define(f"({x.name} * {a.name}).sum(keepdims=True)", "edge", unit)
    share = f"rgnn.edge_softmax(0.7 * {score.name}, {d.one_of(('dst', 'relation'))!r})"
    if len(x.shape) == 1 and d.one_of((True, False, False)):
        return d.define(f"g.sum_to_dst({share}[None, :] * {x.name}[None])", "node", (1, *x.shape))
    return d.define(f"g.sum_to_dst({share} * {x.name})", "node", x.shape)


@production(2)
def scores(d: Drawing) -> Value:
    """A score of edges, often made of rows of both ends, or its softmax; other steps read it again."""
    x = _row(d)
    how = d.one_of(("product", "both ends", "difference", "rows"))
    if how == "product":
        w, a = d.argument("etype", (x.shape[0], 5), x.shape[0] ** -0.5), d.argument("etype", (5,))
        made = f"rgnn.dot({x.name} @ {w.name}, {a.name})"
    elif how == "rows":
        made = f"rgnn.dot({x.name}, {d.partner(x, (x.shape,)).name})"
    else:
        both = [f"g.{end}({d.argument('node', (), 0.7).name})" for end in ("src", "dst")]
        made = f"{both[0]} {'+' if how == 'both ends' else '-'} {both[1]}"
    score = d.define(d.pattern(UNARY).format(f"({made})"), "edge", ())
    if d.one_of((True, True, False)):
        return d.define(f"rgnn.edge_softmax({score.name}, {d.one_of(('dst', 'src', 'relation'))!r})", "edge", ())
    return score


@production(3)
def hops(d: Drawing) -> Value:
    """Several sums weighted by one value of edges: attention diffusion, PageRank with attention."""
    share = d.pick(lambda v: v.space == "edge" and v.shape == ()) or scores(d)
    h = first = d.pick(lambda v: v.space == "node" and len(v.shape) == 1) or d.argument("node", (5,))
    kept, back = d.maybe(), d.one_of((False, False, True))
    for number in range(d.one_of((2, 2, 3))):
        end, to = ("dst", "src") if back and number % 2 else ("src", "dst")
        made = f"g.sum_to_{to}({share.name} * g.{end}({h.name}))"
        made = f"0.9 * {made} + 0.1 * {first.name}" if kept else made
        made = d.pattern(UNARY).format(f"({made})") if d.one_of((False, False, True)) else made
        h = d.define(made, "node", first.shape)
    return h


@production()
def degree(d: Drawing) -> Value:
    x = d.edge()
    pattern = ("{} / g.in_degree(within_relation=True)", "{} / g.in_degree()", "{} * rgnn.rsqrt(g.out_degree())")
    return d.define(d.one_of(pattern).format(x.name), "edge", x.shape)


# --- forms that passes turn into plainer ones -------------------------------------------------------------------------


@production(3)
def heads_in_a_loop(d: Drawing) -> Value:
    """Heads computed one by one, from parts of one product or with parts of one weight, and concatenated or stacked."""
    x, heads = _row(d) if d.maybe() else d.pick(lambda v: len(v.shape) == 1 and v.space == "node"), d.one_of((2, 3))
    x = x or d.argument("node", (d.width,))
    kind, k = d.one_of((_TYPED_BY[x.space], "shared")), x.shape[0]
    how = d.one_of(("weights", "columns", "parts"))
    if how == "weights":
        w = d.argument(kind, (heads, k, 2), k**-0.5)
        rows = [f"{x.name} @ {w.name}[{i}]" for i in range(heads)]
    elif how == "columns":
        w = d.argument(kind, (k, heads * 2), k**-0.5)
        rows = [f"{x.name} @ {w.name}[:, {2 * i}:{2 * i + 2}]" for i in range(heads)]
    else:
        w = d.argument(kind, (k, heads * 2), k**-0.5)
        z = d.define(f"{x.name} @ {w.name}", x.space, (heads * 2,))
        rows = [f"{z.name}[{2 * i}:{2 * i + 2}]" for i in range(heads)]
    if x.space == "node" and d.maybe():
        rows, space = [f"g.src({row})" for row in rows], "edge"
    else:
        space = x.space
    rows, space = _each_head(d, rows, space)
    if d.maybe():
        return d.define(f"rgnn.concatenate([{', '.join(rows)}])", space, (heads * 2,))
    axis = d.one_of((0, 0, 1, -1))
    return d.define(f"rgnn.stack([{', '.join(rows)}], {axis})", space, (heads, 2) if axis == 0 else (2, heads))


def _each_head(d: Drawing, rows: list[str], space: str) -> tuple[list[str], str]:
    """What each head does with its rows: nothing, functions, attention, sums."""
    heads = len(rows)
    if d.maybe():
        vectors = d.argument(d.one_of((_TYPED_BY[space], "shared", space)), (heads, d.one_of((2, 2, 1))))
        function = d.pattern(UNARY)
        rows = [f"({function.format(f'({row})')}) * {vectors.name}[{i}]" for i, row in enumerate(rows)]
    if space != "edge":
        return rows, space
    how = d.one_of(("rows", "sum", "mean", "attention", "scaled"))
    if how == "attention":
        a = d.argument(d.one_of(("etype", "shared")), (heads, 2), 0.7)
        scores = [f"rgnn.dot({row}, {a.name}[{i}])" for i, row in enumerate(rows)]
        return [f"g.sum_to_dst(rgnn.edge_softmax({s}) * ({row}))" for s, row in zip(scores, rows, strict=True)], "node"
    if how == "scaled":
        n = d.argument("edge", (heads,))
        rows = [f"({row}) * {n.name}[{i}]" for i, row in enumerate(rows)]
    return (
        (rows, "edge")
        if how == "rows"
        else ([f"g.{'mean' if how == 'mean' else 'sum'}_to_dst({r})" for r in rows], "node")
    )


@production(2)
def stacked_rows(d: Drawing) -> Value:
    """Rows of several origins stacked, weighted, and summed over the stack, or reshaped and transposed."""
    first = _row(d)
    rows = [first, *(d.partner(first, (first.shape,)) for _ in range(d.one_of((1, 2))))]
    rows = [r if r.space == "edge" else d.define(f"{r.name} + 0 * {first.name}", "edge", r.shape) for r in rows]
    many, axis, k = len(rows), d.one_of((0, -1)), first.shape[0]
    m = d.define(
        f"rgnn.stack([{', '.join(r.name for r in rows)}], {axis})", "edge", (many, k) if axis == 0 else (k, many)
    )
    weights = d.argument(d.one_of(("etype", "shared", "edge")), (many,))
    how = d.one_of(("weighted", "transposed", "swapped", "mean"))
    if how == "weighted":
        if axis == -1 and weights.space != "edge" and d.maybe():
            return d.define(f"{m.name} @ {weights.name}", "edge", (k,))
        by = f"{weights.name}[:, None]" if axis == 0 else f"{weights.name}[None]"
        return d.define(f"({m.name} * {by}).sum({axis})", "edge", (k,))
    if how == "mean":
        return d.define(f"g.sum_to_dst(rgnn.square({m.name})).mean({axis})", "node", (k,))
    turned = (
        d.one_of(("transpose(1, 0)", "transpose()", "transpose((1, 0))")) if how == "transposed" else "swapaxes(0, 1)"
    )
    return d.define(f"{m.name}.{turned}", "edge", m.shape[::-1])


@production(3)
def parts_of_a_product(d: Drawing) -> Value:
    """A product, perhaps with a bias and a function, of which parts are used: gates, queries and keys, FiLM."""
    x = (
        _row(d)
        if d.maybe()
        else d.pick(lambda v: len(v.shape) == 1 and v.space == "node") or d.argument("node", (d.width,))
    )
    kind, k, parts, n = d.one_of((_TYPED_BY[x.space], "shared")), x.shape[0], d.one_of((2, 3)), d.one_of((1, 2))
    rows = f"{x.name} @ {d.argument(kind, (k, parts * n), k**-0.5).name}"
    if d.maybe():
        by = d.argument(d.one_of((kind, x.space)), (d.one_of((parts * n, parts * n, 1)),))
        rows = f"({rows}) {d.one_of('+*')} {by.name}"
    rows = d.pattern(UNARY).format(f"({rows})") if d.maybe() else rows
    space = x.space
    if space == "node" and d.maybe():
        rows, space = f"g.{d.one_of(('src', 'dst'))}({rows})", "edge"
    how = d.one_of(("slices", "slices", "reshape", "indices"))
    y = d.define(rows, space, (parts * n,))
    if how == "reshape":
        y = d.define(f"{y.name}.reshape({parts}, {n})", space, (parts, n))
        found = [f"{y.name}[{i}]" for i in range(parts)]
    elif how == "slices":
        found = [f"{y.name}[{i * n}:{(i + 1) * n}]" for i in range(parts)]
    else:
        found, n = [f"{y.name}[{i}]" for i in range(parts * n)], 0
    found = found[: d.one_of((len(found), len(found), 1))]
    return d.define(" * ".join(f"rgnn.tanh({f})" for f in found), space, (n,) if n else ())


@production(3)
def sum_of_products(d: Drawing) -> Value:
    """Products that share rows or weights, with scales by type or none, added on edges or after sums over edges."""
    x, n = _row(d), 2
    k = x.shape[0]
    w = d.argument(d.one_of(("etype", "shared")), (k, n), k**-0.5)
    basis = d.argument(d.one_of(("etype", "shared")), (3, k, n), k**-0.5)
    scales = [f"{d.argument(d.one_of(('etype', 'shared', 'edge')), (3,)).name}[{i}]" for i in range(3)]
    if d.maybe():  # infinite for types without edges
        total = d.define(f"g.sum_to_edge_type({d.argument('edge', (), values='mask').name} ** 2)", "etype", ())
        scales[0] = d.one_of((f"rgnn.rsqrt({total.name})", f"(1.0 / {total.name})", f"rgnn.log({total.name})"))
    y = d.partner(x, (x.shape,))
    y = y if y.space == "edge" else d.define(f"g.src({d.argument('node', x.shape).name})", "edge", x.shape)
    terms = [
        f"{scales[0]} * ({x.name} @ {w.name})",
        f"({x.name} @ {basis.name}[0]) * {scales[1]}",
        f"({x.name} @ {basis.name}[1]) / (1.5 + rgnn.square({scales[2]}))",
        f"0.5 * ({x.name} @ {basis.name}[2])",
        f"{x.name} @ {w.name}",
        f"{y.name} @ {w.name}",
        f"({y.name} @ {w.name})",
        f"rgnn.tanh({d.argument('edge', (n,)).name})",
    ]
    chosen = d.draw(st.lists(st.sampled_from(terms), min_size=1, max_size=4))
    to = d.one_of(("sum_to_dst", "sum_to_src", "mean_to_dst"))
    chosen = [f"g.{to}({t})" for t in chosen] if (outside := d.maybe()) else chosen
    signs = ["", *(d.one_of((" + ", " + ", " - ")) for _ in chosen[1:])]
    expression = "".join(sign + term for sign, term in zip(signs, chosen, strict=True))
    expression = f"0.0 + {expression}" if d.maybe() else expression
    if outside:
        return d.define(expression, "node", (n,))
    if d.maybe():
        return d.define(f"g.{to}({expression})", "node", (n,))
    return d.define(expression, "edge", (n,))


@production()
def weighted_basis(d: Drawing) -> Value:
    """A sum over a basis of products with weights by type, on nodes or on edges."""
    node = d.pick(lambda v: v.space == "node" and len(v.shape) == 1) or d.argument("node", (d.width,))
    k, many = node.shape[0], d.one_of((2, 3, 4))
    v = d.argument("shared", (many, k, 2), k**-0.5)
    a = d.argument(d.one_of(("etype", "etype", "edge")), (many,))
    end = d.one_of(("src", "dst"))
    y = d.one_of((f"g.{end}({node.name} @ {v.name})", f"g.{end}({node.name}) @ {v.name}"))
    scaled = d.one_of((f"{a.name}[:, None] * ({y})", f"({y}) * {a.name}[:, None]"))
    return d.define(f"({scaled}).sum(0)", "edge", (2,))


@production(2)
def scaled_or_summed_before_a_product(d: Drawing) -> Value:
    """A product of rows times scales, or of sums of rows of several origins."""
    x = _row(d)
    k = x.shape[0]
    kind = d.one_of(("etype", "shared"))
    w = d.argument(kind, d.one_of(((k, 2), (2, k, 2))), k**-0.5)
    if d.maybe():
        c = d.argument(d.one_of(("etype", "edge", "shared")), d.one_of(((), (1,))))
        rows = d.one_of((f"{c.name} * {x.name}", f"{x.name} * {c.name}", f"{x.name} / (1.5 + rgnn.square({c.name}))"))
    else:
        others = [
            d.argument("etype", d.one_of(((k,), ()))),
            _row(d),
            d.define(f"g.dst({d.argument('node', (k,)).name})", "edge", (k,)),
        ]
        others = [o for o in others if o.shape in ((k,), ())]
        rows = x.name + "".join(f" {d.one_of('++-')} {o.name}" for o in others)
    product = f"({rows}) @ {w.name}"
    if d.maybe():
        return d.define(
            f"g.{d.one_of(('sum', 'max') if not d.narrow else ('sum',))}_to_dst({product})", "node", w.shape[:-2] + (2,)
        )
    return d.define(product, "edge", w.shape[:-2] + (2,))


@production(2)
def sum_of_terms(d: Drawing) -> Value:
    """A sum over edges of several terms, products with shared weights, biases and rows among them, with a scale."""
    x, n = _row(d), d.one_of((1, 2, 5))
    k = x.shape[0]
    terms = [
        f"{x.name} @ {d.argument('shared', (k, n), k**-0.5).name}",
        d.argument("shared", (n,)).name,
        d.argument("etype", (n,)).name,
        f"rgnn.relu({d.argument('edge', (2,)).name} + 0.31) @ {d.argument('shared', (2, n)).name}",
        f"g.dst({d.argument('node', (n,)).name})",
        f"{x.name} @ {d.argument('etype', (k, n), k**-0.5).name}",
    ]
    terms = d.draw(
        st.lists(
            st.sampled_from([t for t in terms if not (d.narrow and "relu" in t)]), min_size=2, max_size=4, unique=True
        )
    )
    signs = ["", *(d.one_of((" + ", " - ")) for _ in terms[1:])]
    rows = "".join(sign + term for sign, term in zip(signs, terms, strict=True))
    if d.maybe():
        scale = d.argument(d.one_of(("edge", "etype")), ())
        rows = d.one_of(
            (f"{scale.name} * ({rows})", f"({rows}) * {scale.name}", f"({rows}) / (1.5 + rgnn.square({scale.name}))")
        )
    if not any("g.dst" in t or "@" in t for t in terms):
        rows = f"{rows} + 0 * {d.argument('edge', ()).name}"
    return d.define(f"g.{d.one_of(('sum_to_dst', 'sum_to_src', 'mean_to_dst'))}({rows})", "node", (n,))


@production(2)
def softmax_written_out(d: Drawing) -> Value:
    """A softmax by its definition over the edges of a node, a type or all, with what is usually added to the sum."""
    x = d.any()
    to, back = d.one_of((("dst", "g.dst({})"), ("src", "g.src({})"), ("graph", "{}"), ("edge_type", "{}")))
    x, to, back = (x, to, back) if x.space == "edge" else (x, *d.one_of((("graph", "{}"), ("node_type", "{}"))))
    shift = back.format(f"g.max_to_{to}({x.name})")
    shift = f"rgnn.stop_gradient({shift})" if d.narrow or d.maybe() else shift
    p = d.define(f"rgnn.exp({x.name} - {shift})", x.space, x.shape)
    total = back.format(f"g.sum_to_{to}({p.name})")
    small = d.one_of(("", "", " + 1e-16", " + 1e-30", " + 1e-3"))
    share = f"{p.name} / ({total}{small})"
    if x.space == "edge" and d.maybe():
        return d.define(f"g.sum_to_dst({share})", "node", x.shape)
    return d.define(share, x.space, x.shape)


@production()
def neutral_operations(d: Drawing) -> Value:
    """Zeros added, ones multiplied, squares as powers, inner products as sums, and reshapes to and fro."""
    x = d.wide(2)
    how = d.one_of(("neutral", "square", "dot", "dot", "reshape", "reshape and sum"))
    if how == "neutral":
        return d.define(f"(0 + {x.name} * 1.0)", x.space, x.shape)
    if how == "square":
        return d.define(f"rgnn.tanh({x.name}) ** 2", x.space, x.shape)
    if how == "dot":
        y, keep = d.partner(x, (x.shape,)), d.maybe()
        shape = (*x.shape[:-1], 1) if keep else x.shape[:-1]
        return d.define(f"({x.name} * {y.name}).sum(-1, keepdims={keep})", x.space, shape)
    flat = math.prod(x.shape)
    if how == "reshape" or x.space != "edge":
        return d.define(f"{x.name}.reshape(1, {flat}).reshape({flat})", x.space, (flat,))
    how = d.one_of(("sum", "mean") if d.narrow else ("sum", "mean", "max"))
    return d.define(f"g.{how}_to_dst(rgnn.tanh({x.name}).reshape({flat}))", "node", (flat,))


@production()
def normalised_rows(d: Drawing) -> Value:
    """Wide rows of one end divided by their norm, or less their mean, whose rows are 0 / 0 where nothing reads them."""
    x = d.argument("node", (9,))
    end = d.one_of(("src", "dst"))
    row = d.define(f"g.{end}({x.name})", "edge", (9,))
    if d.maybe():  # infinite at nodes without edges
        degree = f"g.sum_to_{end}({d.argument('edge', (), values='mask').name} ** 2)"
        row = d.define(f"{row.name} * g.{end}(rgnn.rsqrt({degree}))", "edge", (9,))
    norm = f"rgnn.sqrt(rgnn.square({row.name}).sum(keepdims=True) + {d.one_of((1.5, 1e-2))})"
    centred = f"({row.name} - {row.name}.mean(keepdims=True))"
    spread = f"rgnn.rsqrt(rgnn.square({centred}).mean(keepdims=True) + 0.1)"
    how = d.one_of(
        (f"{row.name} / {norm}", f"{centred} * {spread}", f"{row.name} * rgnn.exp(-{row.name}.max(keepdims=True))")
    )
    if d.maybe():
        return d.define(f"({how}) @ {d.argument('etype', (9, 2), 0.3).name}", "edge", (2,))
    return d.define(how, "edge", (9,))


# --- programs --------------------------------------------------------------------------------------------------------


@st.composite
def recipes(
    draw: st.DrawFn, max_steps: int = 12, narrow: str = "", scaled: bool = False, width: int = 3, whole: bool = False
) -> Recipe:
    """Programs of a few steps that read earlier values; values that no step reads are returned.

    Args:
      max_steps: at most so many productions.
      narrow: "float16" or "bfloat16": most arguments are of that dtype.
      scaled: arguments may have offsets, and columns of scales that differ.
      width: the last axis of most arguments that have one.
      whole: some arguments are integers of 8 or 32 bits.
    """
    drawing = Drawing(draw, narrow, draw(st.sampled_from((0.0, 1.0, 3.0))) if scaled else 0.0, scaled, width, whole)
    # A row of 5 is wide beside a scalar for the compiler, which then stores inner products of edges.
    drawing.argument("node", draw(st.sampled_from(((5,), (width,), (2, width), (2, 2), (), (2, 1), (1, width)))))
    table = [step for step, weight in PRODUCTIONS.items() for _ in range(weight)]
    steps = draw(st.integers(2, max_steps))  # the length of a drawn list would almost always be short
    for step in draw(st.lists(st.sampled_from(table), min_size=steps, max_size=steps)):
        step(drawing)
    text = "\n".join(drawing.lines)
    read = [len(re.findall(rf"\b{v.name}\b", text)) > 1 for v in drawing.pool]
    returned = [v.name for v, used in zip(drawing.pool, read, strict=True) if not used]
    # A value that is both used and returned.
    others = [v.name for v, used in zip(drawing.pool, read, strict=True) if used and v.space in ("node", "edge")]
    if others and draw(st.booleans()):
        returned.append(draw(st.sampled_from(others[::-1])))
    return Recipe(tuple(drawing.lines), tuple(drawing.inputs), tuple(returned))
