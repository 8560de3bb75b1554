"""What a specification of a zoo layer is: the class that all derive from, and the shapes of parameters.

A specification has the layer's settings as fields, the shapes and initialisers of its parameters (`params`), the
program, and the names of the fields that the program takes (`passed`). `dejax.rgnn.nnx` and `dejax.rgnn.linen` derive
from it the arguments, the documentation and the call of a module. So a new layer is one function and one specification.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax import Array
from jax.nn.initializers import glorot_uniform, zeros
from jax.typing import DTypeLike

from dejax.rgnn.compiler.program import Program
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers.dropout import inverted
from dejax.rgnn.layers.parameters import GLOROT, PER_MATRIX, ParamSpec, ParamSpecs, cast, check_size
from dejax.rgnn.layers.zoo.bipartite import spread
from dejax.rgnn.options import Options

FROM_CALL = ("in_features", "edge_features", "num_edge_types", "num_node_types")
"""Fields that a linen module takes from the arguments of its first call."""

# [heads, k, d] is one k x (heads d) matrix.
_HEADS = glorot_uniform(in_axis=1, out_axis=(0, 2))


def matrix(*shape: int) -> ParamSpec:
    """A matrix of Glorot's initialiser, or several along the axes before the last two."""
    return ParamSpec(shape, GLOROT if len(shape) == 2 else PER_MATRIX[len(shape)])


def heads_of(*shape: int) -> ParamSpec:
    """A matrix for each head, [heads, k, d], initialised as one of k rows and heads * d columns."""
    return ParamSpec(shape, _HEADS)


def zeros_of(*shape: int) -> ParamSpec:
    """A parameter that begins as zeros, such as a bias."""
    return ParamSpec(shape, zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooSpec:
    """A layer of the zoo.

    Attributes:
      name: of the module.
      program: the layer as a function of graph, features and parameters.
      passed: the fields that are keywords of the program.
      pairs: whether x may be a pair (sources, destinations).
      edge_argument: the program's keyword for values of edges; None: it has none.
    """

    name: ClassVar[str]
    program: ClassVar[Program]
    passed: ClassVar[tuple[str, ...]] = ()
    pairs: ClassVar[bool] = False
    edge_argument: ClassVar[str | None] = None

    in_features: int | tuple[int, int]
    out_features: int
    dtype: DTypeLike | None = None
    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        for name, value in _sizes(self):
            check_size(self.name, name, value)
        rate = self.attention_rate
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{self.name}: attention_dropout is the share dropped and must be in [0, 1), got {rate}")
        if isinstance(self.in_features, tuple) and not self.pairs:
            raise ValueError(f"{self.name}: in_features must be one width, got {self.in_features}")

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the features of sources and of destinations."""
        k = self.in_features
        return k if isinstance(k, tuple) else (k, k)

    @property
    def attention_rate(self) -> float:
        rate: float = getattr(self, "attention_dropout", 0.0)
        return rate

    @property
    def stochastic(self) -> bool:
        return self.attention_rate > 0

    def params(self) -> ParamSpecs:
        """The parameters, by the names that the program has for them."""
        raise NotImplementedError

    def __call__(
        self, graph: RelGraph, x: Any, params: dict[str, Array], key: Array | None = None, edge_features: Any = None
    ) -> Any:
        """The program's result; attention is dropped where `key` is given.

        Raises:
          ValueError: the graph's counts, or the shapes of x and edge_features, are not those of the specification.
        """
        for count in ("num_edge_types", "num_node_types"):
            made_for = getattr(self, count, None)
            if made_for is not None and getattr(graph, count) != made_for:
                raise ValueError(
                    f"{self.name} was made for {count}={made_for}, got a graph with {count}={getattr(graph, count)}"
                )
        rows = slice(None)
        if isinstance(self.in_features, tuple) or isinstance(x, tuple | list):
            if not (isinstance(x, tuple | list) and len(x) == 2 and self.pairs):
                raise ValueError(f"{self.name}: x must be {self._expected(graph)}, got {_described(x)}")
            x, rows = spread(self.name, graph, x, self.widths)
        elif getattr(x, "shape", None) != (graph.num_nodes, self.in_features):
            raise ValueError(f"{self.name}: x must be {self._expected(graph)}, got {_described(x)}")
        edges = self._edges(graph, edge_features)
        x, edges, params = cast((x, edges, params), self.dtype)
        if key is not None and self.stochastic:
            heads: int = getattr(self, "num_heads", 1)
            dtype = jax.tree.leaves(params)[0].dtype
            params = {**params, "edge_scale": inverted(key, self.attention_rate, (graph.num_edges, heads), dtype)}
        y = self.run(graph, x, params, edges)
        return y if rows == slice(None) else y[rows]

    def run(self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array]) -> Any:
        """The program on checked arguments."""
        keywords = {name: getattr(self, name) for name in self.passed}
        return type(self).program(graph, x, params, **edges, **keywords, options=self.options)

    def _expected(self, graph: RelGraph) -> str:
        if isinstance(self.in_features, tuple):
            return f"a pair of features (sources, destinations) of widths {self.in_features}"
        return f"an array of shape [num_nodes, in_features] = {[graph.num_nodes, self.in_features]}"

    def _edges(self, graph: RelGraph, edge_features: Any) -> dict[str, Array]:
        """The keyword of the program for values of edges."""
        if self.edge_argument is None:
            if edge_features is not None:
                raise ValueError(f"{self.name} takes no edge_features, got {_described(edge_features)}")
            return {}
        shape: tuple[int, ...]
        if self.edge_argument == "edge_weight":
            if edge_features is None:
                return {}
            shape = (graph.num_edges,)
        else:
            width = getattr(self, "edge_features", None)
            if width is None:
                if edge_features is not None:
                    raise ValueError(
                        f"{self.name} was made without edge_features, got {_described(edge_features)}; give their "
                        "width to the layer"
                    )
                return {}
            shape = (graph.num_edges, width)
        if getattr(edge_features, "shape", None) != shape:
            raise ValueError(f"{self.name}: edge_features must have shape {shape}, got {_described(edge_features)}")
        return {self.edge_argument: edge_features}


def _sizes(spec: ZooSpec) -> Iterator[tuple[str, Any]]:
    """The widths and counts: what is declared as an integer. Other fields may be 0, such as a slope."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value is not None and str(field.type).startswith("int"):
            yield from ((field.name, size) for size in (value if isinstance(value, tuple) else (value,)))


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return f"shape {x.shape}" if hasattr(x, "shape") else repr(x)
