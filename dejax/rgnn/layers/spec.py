"""What a specification of a layer is: the class that all specifications derive from, and the shapes of parameters.

A specification has the layer's settings as fields, the shapes and initialisers of its parameters (`params`), the
program, and the names of the fields that the program takes (`passed`). `dejax.rgnn.nnx` and `dejax.rgnn.linen` make
their modules from it: the arguments, the documentation and the call (`modules.py`). Both call the same specification,
so the same parameters and the same dropout key give the same values in both.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import jax
from jax import Array
from jax.nn.initializers import zeros
from jax.typing import DTypeLike

from dejax._dtypes import numbers
from dejax.rgnn.compiler.program import Program
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers.bipartite import spread
from dejax.rgnn.layers.dropout import inverted
from dejax.rgnn.layers.parameters import GLOROT, PER_MATRIX, Glorot, ParamSpec, ParamSpecs, cast, check_size
from dejax.rgnn.options import Options

# [heads, k, d] is one k x (heads d) matrix.
_HEADS = Glorot(1, (0, 2))


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
class LayerSpec(abc.ABC):
    """A layer's settings, parameters and program.

    A field whose type is a `Literal` must have one of its values; a field of integers, at least 1; a field whose name
    ends in `dropout` is a share in [0, 1). A layer takes a pair of features (sources, destinations) where the type of
    its field `in_features` has a tuple.

    Attributes:
      name: the name of the module.
      program: the layer as a function of graph, features and parameters.
      passed: the fields that are keywords of the program.
      edge_argument: the program's keyword for values of edges; None: it has none.
    """

    name: ClassVar[str]
    program: ClassVar[Program]
    passed: ClassVar[tuple[str, ...]] = ()
    edge_argument: ClassVar[str | None] = None

    in_features: int | tuple[int, int] | None
    out_features: int
    dtype: DTypeLike | None = None
    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            self._check_field(field.name, hints[field.name])
        for name, rate in self.dropout_rates.items():
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{self.name}: {name}, the share that is dropped, must be in [0, 1), got {rate}")
        if isinstance(self.in_features, tuple) and not self.takes_pairs():
            raise ValueError(f"{self.name}: in_features must be one width, got {self.in_features}")

    @classmethod
    def takes_pairs(cls) -> bool:
        """Whether x may be a pair (sources, destinations)."""
        return any(get_origin(hint) is tuple for hint in get_args(get_type_hints(cls)["in_features"]))

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the features of sources and of destinations; 0 for a layer without features."""
        k = self.in_features
        return k if isinstance(k, tuple) else (k or 0, k or 0)

    @property
    def dropout_rates(self) -> dict[str, float]:
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name.endswith("dropout")}

    @property
    def stochastic(self) -> bool:
        return any(self.dropout_rates.values())

    @property
    def graph_counts(self) -> dict[str, int]:
        """The counts that a graph must have, by the names of its attributes."""
        counts = {name: getattr(self, name, None) for name in ("num_edge_types", "num_node_types")}
        return {name: count for name, count in counts.items() if count is not None}

    @abc.abstractmethod
    def params(self) -> ParamSpecs:
        """The parameters, by the names that the program has for them."""

    def __call__(
        self, graph: RelGraph, x: Any, params: dict[str, Array], key: Array | None = None, edge_features: Any = None
    ) -> Any:
        """The program's result; with dropout where `key` is given.

        Raises:
          ValueError: the graph's counts, or the shapes of x and edge_features, are not those of the specification.
          TypeError: the first argument is no graph.
        """
        if not hasattr(graph, "num_nodes"):
            raise TypeError(
                f"{self.name}: the first argument must be a RelGraph, got {described(graph)}; call layer(graph, x)"
            )
        for name, count in self.graph_counts.items():
            if getattr(graph, name) != count:
                raise ValueError(
                    f"{self.name}: the graph must have {name}={count}, for which the layer was made, got "
                    f"{getattr(graph, name)}; make the layer with the graph's number"
                )
        x, rows = self._nodes(graph, jax.tree.map(self._numbers, x))
        edges = self._edges(graph, jax.tree.map(self._numbers, edge_features))
        x, edges, params = cast((x, edges, params), self.dtype)
        if key is None or not self.stochastic:
            y = self.run(graph, x, params, edges)
        else:
            y = self.run_with_dropout(graph, x, params, edges, key)
        return y if rows is None else y[rows]

    def run(self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array]) -> Any:
        """The program on checked arguments."""
        keywords = {name: getattr(self, name) for name in self.passed}
        return type(self).program(graph, x, params, **edges, **keywords, options=self.options)

    def run_with_dropout(
        self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array], key: Array
    ) -> Any:
        """The program with dropout: of the attention after the softmax, separately for each edge and head."""
        shape = (graph.num_edges, getattr(self, "num_heads", 1))
        scale = inverted(key, self.dropout_rates["attention_dropout"], shape, jax.tree.leaves(params)[0].dtype)
        return self.run(graph, x, {**params, "edge_scale": scale}, edges)

    def _check_field(self, name: str, hint: Any) -> None:
        """Widths and counts are what is declared as an integer. Other fields may be 0, such as a slope."""
        value, choices = getattr(self, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            listed = ", ".join(map(repr, choices[:-1]))
            raise ValueError(f"{self.name}: {name} must be {listed} or {choices[-1]!r}, got {value!r}")
        if int in (hint, *choices) and value is not None:
            for size in value if isinstance(value, tuple) else (value,):
                check_size(self.name, name, size)

    def _numbers(self, x: Any) -> Any:
        """A leaf of the features, as an array whose dtype jax has; scalars stay, for the check of shapes."""
        return numbers(f"{self.name}: features", x) if hasattr(x, "shape") else x

    def _nodes(self, graph: RelGraph, x: Any) -> tuple[Any, slice | None]:
        """x with a row for each node of the graph, and the rows of the result; None: all of them."""
        if isinstance(self.in_features, tuple) or isinstance(x, tuple | list):
            if not (isinstance(x, tuple | list) and len(x) == 2 and self.takes_pairs()):
                raise ValueError(f"{self.name}: x must be {self._expected(graph)}, got {described(x)}")
            return spread(self.name, graph, x, self.widths)
        if getattr(x, "shape", None) != (graph.num_nodes, self.in_features):
            remedy = (
                "; concatenate the types in the order of graph.node_type_names, or use dejax.minibatch.nnx.HeteroGNN"
            )
            raise ValueError(
                f"{self.name}: x must be {self._expected(graph)}, got {described(x)}"
                + (remedy if isinstance(x, dict) else "")
            )
        return x, None

    def _expected(self, graph: RelGraph) -> str:
        if isinstance(self.in_features, tuple):
            return f"a pair of features (sources, destinations) of widths {self.in_features}"
        return f"an array of shape [num_nodes, in_features] = {[graph.num_nodes, self.in_features]}"

    def _edges(self, graph: RelGraph, edge_features: Any) -> dict[str, Array]:
        """The keyword of the program for values of edges."""
        if self.edge_argument is None:
            if edge_features is not None:
                raise ValueError(
                    f"{self.name}: edge_features must be None, because this layer takes none, got "
                    f"{described(edge_features)}"
                )
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
                        f"{self.name}: edge_features must be None for a layer that was made without their width, got "
                        f"{described(edge_features)}; give their width when the layer is made"
                    )
                return {}
            shape = (graph.num_edges, width)
        if getattr(edge_features, "shape", None) != shape:
            raise ValueError(f"{self.name}: edge_features must have shape {shape}, got {described(edge_features)}")
        return {self.edge_argument: edge_features}


def described(x: Any) -> str:
    """An argument in an error message."""
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, dict):
        return f"a dict with {', '.join(map(repr, x))}"
    if hasattr(x, "shape"):
        return f"an array of shape {x.shape}"
    return repr(x) if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"
