"""Programs drawn from the grammar of the front end, as Python source: what fails prints as a program to run by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dejax import rgnn
from tests.rgnn.contract import row_counts
from tests.rgnn.strategies import EdgeList

Shape = tuple[int, ...]
_SIZES = st.sampled_from((1, 2, 3))
# The front end's word for an argument with rows of each kind, and the kind of constants that such rows may meet.
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

# Functions whose values and slopes stay small. Functions with a kink are moved away from 0, which many rows hold.
_UNARY = (
    "rgnn.tanh({})",
    "rgnn.sigmoid({})",
    "rgnn.erf({})",
    "rgnn.silu({})",
    "rgnn.gelu({})",
    "rgnn.exp(rgnn.tanh({}))",
    "rgnn.log(1.5 + rgnn.square({}))",
    "rgnn.sqrt(1.5 + rgnn.square({}))",
    "rgnn.rsqrt(1.5 + rgnn.square({}))",
    "rgnn.reciprocal(1.5 + rgnn.square({}))",
    "rgnn.relu({} + 0.123)",
    "rgnn.leaky_relu({} - 0.123)",
    "rgnn.elu({} + 0.321)",
    "rgnn.abs({} + 0.213)",
    "rgnn.square(rgnn.tanh({}))",
    "rgnn.tanh({}) ** 3",
    "-{}",
    "0.7 * {}",
    "rgnn.stop_gradient({})",
)


@dataclass(frozen=True)
class Value:
    name: str
    space: str
    shape: Shape


@dataclass(frozen=True)
class Recipe:
    """A program as source, and the arrays that it takes: kind of rows, shape of a row, standard deviation."""

    lines: tuple[str, ...]
    inputs: tuple[tuple[str, Shape, float], ...]
    returns: tuple[str, ...]

    def __repr__(self) -> str:
        shapes = ", ".join(f"a[{i}]: {kind} {shape}" for i, (kind, shape, _) in enumerate(self.inputs))
        return f"\n# {shapes}\n{self.source}"

    @property
    def source(self) -> str:
        body = [*self.lines, f"return {', '.join(self.returns)},"]
        return "def drawn(g, a):\n" + "\n".join(f"    {line}" for line in body)

    def program(self) -> Any:
        scope: dict[str, Any] = {"rgnn": rgnn}
        exec(self.source, scope)
        return rgnn.program(scope["drawn"])

    def arrays(self, edges: EdgeList) -> list[np.ndarray]:
        rng, rows = np.random.default_rng(len(self.lines)), row_counts(edges)
        shapes = [shape if kind == "shared" else (rows[kind], *shape) for kind, shape, _ in self.inputs]
        return [rng.normal(size=shape) * scale for shape, (_, _, scale) in zip(shapes, self.inputs, strict=True)]


class _Drawing:
    """A program in the making."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.inputs: list[tuple[str, Shape, float]] = []
        self.pool: list[Value] = []

    def define(self, expression: str, space: str, shape: Shape) -> Value:
        value = Value(f"v{len(self.pool)}", space, shape)
        self.lines.append(f"{value.name} = {expression}")
        self.pool.append(value)
        return value

    def argument(self, kind: str, shape: Shape, scale: float = 1.0) -> Value:
        self.inputs.append((kind, shape, scale))
        return self.define(f"g.{_DECLARE[kind]}(a[{len(self.inputs) - 1}])", kind, shape)

    def pick(self, suits: Callable[[Value], bool]) -> Value | None:
        # The latest first: hypothesis shrinks towards it, and long chains are what is looked for.
        found = [v for v in reversed(self.pool) if suits(v)]
        return self.draw(st.sampled_from(found)) if found else None

    def node(self) -> Value:
        return self.pick(lambda v: v.space == "node") or self.argument(
            "node", self.draw(st.sampled_from(((3,), (2, 3), ())))
        )

    def edge(self) -> Value:
        return self.pick(lambda v: v.space == "edge") or self.read()

    def any(self) -> Value:
        return self.pick(lambda v: v.space in ("node", "edge")) or self.node()

    # --- steps -------------------------------------------------------------------------------------------------------

    def read(self) -> Value:
        value = self.pick(lambda v: v.space in ("node", "ntype")) or self.node()
        return self.define(f"g.{self.draw(st.sampled_from(('src', 'dst')))}({value.name})", "edge", value.shape)

    def read_pair(self) -> Value:
        value = self.pick(lambda v: v.space == "source_pair") or self.argument("source_pair", (3,))
        return self.define(f"g.src({value.name})", "edge", value.shape)

    def new_argument(self) -> Value:
        kind = self.draw(st.sampled_from(tuple(_DECLARE)))
        return self.argument(kind, self.draw(st.sampled_from(((3,), (2, 3), (), (1,), (2, 1)))))

    def linear(self) -> Value:
        x = self.pick(lambda v: len(v.shape) in (1, 2)) or self.argument("node", (3,))
        kind = self.draw(st.sampled_from((_TYPED_BY[x.space], "shared")))
        k, n = x.shape[-1], self.draw(_SIZES)
        heads = x.shape[0] if len(x.shape) == 2 else self.draw(_SIZES)
        same = kind == x.space  # rows of types times weights of types: no heads beside a matrix of two axes
        shape = (heads, k, n) if self.draw(st.booleans()) and not (same and len(x.shape) == 2) else (k, n)
        w = (
            self.pick(lambda v: v.space == kind and v.shape == shape and v is not x)
            if self.draw(st.booleans())
            else None
        )
        w = w or self.argument(kind, shape, k**-0.5)
        if len(shape) == 3 or len(x.shape) == 2:
            out: Shape = (heads, n)
        else:
            out = (n,)
        return self.define(f"{x.name} @ {w.name}", x.space, out)

    def partner(self, x: Value, shapes: tuple[Shape, ...]) -> Value:
        """Another value that may meet `x`: of its space, or a constant by type, or shared."""
        spaces = (x.space, *((_TYPED_BY[x.space], "shared") if x.space != "shared" else ()))
        suits = lambda v: v is not x and v.space in spaces and v.shape in shapes  # noqa: E731
        found = self.pick(suits) if self.draw(st.booleans()) else None
        return found or self.argument(self.draw(st.sampled_from(spaces)), self.draw(st.sampled_from(shapes)))

    def dot(self) -> Value:
        x = self.pick(lambda v: len(v.shape) in (1, 2)) or self.argument("node", (3,))
        y = self.partner(x, (x.shape,))
        return self.define(f"rgnn.dot({x.name}, {y.name})", x.space, x.shape[:-1])

    def binary(self) -> Value:
        x = self.any()
        wide = tuple(2 if size == 1 else size for size in x.shape)
        shapes = ((), x.shape, tuple(1 for _ in x.shape), (*x.shape[:-1], 1), (*x.shape[:-1], *wide[-1:]), wide)
        y = self.partner(x, tuple(dict.fromkeys(s for s in shapes if len(s) in (0, len(x.shape)))))
        pattern = self.draw(
            st.sampled_from(
                (
                    "{} * {}",
                    "{} + {}",
                    "{} - {}",
                    "{} / (1.5 + rgnn.square({}))",
                    "rgnn.maximum({}, {} + 0.123)",
                    "rgnn.minimum({} * 0.9, {})",
                    "rgnn.where_positive({0} + 0.123, {1}, {0})",
                )
            )
        )
        names = (x.name, y.name)
        if self.draw(st.booleans()) and y.space == x.space and y.shape == x.shape:
            names = names[::-1]
        shape = np.broadcast_shapes(x.shape, y.shape)
        return self.define(pattern.format(*names), x.space, tuple(map(int, shape)))

    def unary(self) -> Value:
        x = self.any()
        return self.define(self.draw(st.sampled_from(_UNARY)).format(x.name), x.space, x.shape)

    def features(self) -> Value:
        x = self.pick(lambda v: len(v.shape) in (1, 2)) or self.argument("node", (2, 3))
        width = int(np.prod(x.shape))
        axis = self.draw(st.integers(0, len(x.shape) - 1))
        size, rest = x.shape[axis], (*x.shape[:axis], *x.shape[axis + 1 :])
        start = self.draw(st.integers(0, size - 1))
        stop = self.draw(st.integers(start + 1, size))
        colons = ":, " * axis
        choices: list[tuple[str, Shape]] = [
            ("{}.reshape(-1)", (width,)),
            ("{}.reshape(-1, 1)", (width, 1)),
            ("{}.reshape(1, -1)", (1, width)),
            ("{}[None]", (1, *x.shape)),
            ("{}[..., None]", (*x.shape, 1)),
            (f"{{}}[{colons}{start}:{stop}]", (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])),
            (f"{{}}[{colons}{start}]", rest),
            (f"{{}}.sum({axis})", rest),
            (f"{{}}.mean({axis}, keepdims=True)", (*x.shape[:axis], 1, *x.shape[axis + 1 :])),
        ]
        pattern, shape = self.draw(st.sampled_from([c for c in choices if len(c[1]) <= 2]))
        return self.define(pattern.format(x.name), x.space, shape)

    def concatenate(self) -> Value:
        x = self.pick(lambda v: len(v.shape) in (1, 2)) or self.argument("node", (3,))
        y = self.partner(x, (x.shape, (*x.shape[:-1], 2)))
        shape = (*x.shape[:-1], x.shape[-1] + y.shape[-1])
        return self.define(f"rgnn.concatenate([{x.name}, {y.name}])", x.space, shape)

    def softmax(self) -> Value:
        x = self.edge()
        within = self.draw(st.sampled_from(("dst", "relation")))
        return self.define(f"rgnn.edge_softmax({x.name}, within={within!r})", "edge", x.shape)

    def reduce(self) -> Value:
        x = self.edge()
        how = self.draw(
            st.sampled_from(("sum_to_dst", "mean_to_dst", "max_to_dst", "sum_to_src", "mean_to_src", "max_to_src"))
        )
        return self.define(f"g.{how}({x.name})", "node", x.shape)

    def attention(self) -> Value:
        """A sum weighted by a softmax, the pattern that the compiler makes one pass of."""
        x = self.edge()
        score = self.partner(x, (x.shape[:1],) if len(x.shape) == 2 else ((),))
        if score.space != "edge":
            score = (
                self.define(f"{score.name} * g.in_degree()", "edge", score.shape) if score.space != "shared" else score
            )
        if score.space == "shared":
            score = self.define(f"rgnn.rsqrt(g.out_degree()) * {score.name}", "edge", score.shape)
        within = self.draw(st.sampled_from(("dst", "relation")))
        axis = "[..., None]" if score.shape else ""
        how = self.draw(st.sampled_from(("sum_to_dst", "sum_to_dst", "mean_to_dst", "sum_to_src")))
        return self.define(f"g.{how}(rgnn.edge_softmax({score.name}, {within!r}){axis} * {x.name})", "node", x.shape)

    def degree(self) -> Value:
        x = self.edge()
        pattern = ("{} / g.in_degree(within_relation=True)", "{} / g.in_degree()", "{} * rgnn.rsqrt(g.out_degree())")
        return self.define(self.draw(st.sampled_from(pattern)).format(x.name), "edge", x.shape)


_STEPS = (
    "linear linear linear read read reduce reduce reduce attention attention dot binary binary unary features "
    "concatenate softmax degree read_pair new_argument"
).split()


@st.composite
def recipes(draw: st.DrawFn, max_steps: int = 12) -> Recipe:
    """Programs of a few steps, each of which reads values made before; what no step reads is returned."""
    drawing = _Drawing(draw)
    drawing.argument("node", draw(st.sampled_from(((3,), (2, 3), (2, 2), ()))))
    steps = draw(st.integers(2, max_steps))  # a list's own length would be short nearly always
    for step in draw(st.lists(st.sampled_from(_STEPS), min_size=steps, max_size=steps)):
        getattr(drawing, step)()
    text = "\n".join(drawing.lines)
    read = [len(re.findall(rf"\b{v.name}\b", text)) > 1 for v in drawing.pool]
    returned = [v.name for v, used in zip(drawing.pool, read, strict=True) if not used]
    # A value that is used and returned too.
    others = [v.name for v, used in zip(drawing.pool, read, strict=True) if used and v.space in ("node", "edge")]
    if others and draw(st.booleans()):
        returned.append(draw(st.sampled_from(others[::-1])))
    return Recipe(tuple(drawing.lines), tuple(drawing.inputs), tuple(returned))
