"""Specifications of the zoo's layers: one class for each, from which the modules of both Flaxes are made.

A specification has the layer's settings as fields, the shapes and initialisers of its parameters (`params`), the
program, and the names of the fields that the program takes (`passed`). `dejax.rgnn.nnx` and `dejax.rgnn.linen` derive
from it the arguments, the documentation and the call of a module. So a new layer is one function and one specification.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import glorot_uniform, zeros
from jax.typing import DTypeLike

from dejax.rgnn.compiler.program import Program
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers.dropout import inverted
from dejax.rgnn.layers.parameters import GLOROT, PER_MATRIX, ParamSpec, ParamSpecs, attention_vector, cast
from dejax.rgnn.layers.zoo import attention, convolutions, relational
from dejax.rgnn.layers.zoo.bipartite import spread
from dejax.rgnn.options import Options

FROM_CALL = ("in_features", "edge_features", "num_edge_types", "num_node_types")
"""Fields that a linen module takes from the arguments of its first call."""

# [heads, k, d] is one k x (heads d) matrix.
_HEADS = glorot_uniform(in_axis=1, out_axis=(0, 2))


def _matrix(*shape: int) -> ParamSpec:
    return ParamSpec(shape, GLOROT if len(shape) == 2 else PER_MATRIX[len(shape)])


def _heads(*shape: int) -> ParamSpec:
    return ParamSpec(shape, _HEADS)


def _zeros(*shape: int) -> ParamSpec:
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
            if value < 1:
                raise ValueError(f"{self.name}: {name} must be at least 1, got {value}")
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


def _sizes(spec: ZooSpec) -> Iterator[tuple[str, int]]:
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        for size in value if field.name == "in_features" and isinstance(value, tuple) else (value,):
            if isinstance(size, int) and not isinstance(size, bool):
                yield field.name, size


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return f"shape {x.shape}" if hasattr(x, "shape") else repr(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class GCNSpec(ZooSpec):
    """GCN (arXiv 1609.02907); the equation is in `dejax.rgnn.zoo.gcn`. `edge_features` of a call are weights [edges].

    Args:
      add_self_loops: whether the identity is added to the adjacency matrix.
      use_bias: adds `bias` [n].
    """

    name = "GCNConv"
    program = convolutions.gcn
    passed = ("add_self_loops",)
    edge_argument = "edge_weight"
    add_self_loops: bool = True
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        k, n = self.widths[0], self.out_features
        return {"weight": _matrix(k, n)} | ({"bias": _zeros(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class SAGESpec(ZooSpec):
    """GraphSAGE (arXiv 1706.02216); the equation is in `dejax.rgnn.zoo.graphsage`.

    Args:
      aggregation: `"mean"`, `"max"` or `"sum"`.
      pool_features: width of the paper's pooling perceptron before the aggregation; None: neighbours as they are.
      normalize: whether rows of the result get norm 1.
      use_root, use_bias: adds `x @ root`, and `bias` [n].
    """

    name = "SAGEConv"
    program = convolutions.graphsage
    passed = ("aggregation", "normalize")
    pairs = True
    aggregation: Literal["mean", "max", "sum"] = "mean"
    pool_features: int | None = None
    normalize: bool = False
    use_root: bool = True
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        (k, m), n, p = self.widths, self.out_features, self.pool_features
        specs = {} if p is None else {"pool": _matrix(k, p), "pool_bias": _zeros(p)}
        specs["neighbour"] = _matrix(k if p is None else p, n)
        if self.use_root:
            specs["root"] = _matrix(m, n)
        return specs | ({"bias": _zeros(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class GINSpec(ZooSpec):
    """GIN (arXiv 1810.00826) and, with edge features, GINE (arXiv 1905.12265); see `dejax.rgnn.zoo.gin`.

    Args:
      hidden_features: width of the perceptron's hidden layer; None for out_features.
      edge_features: width of the edge features; None: the layer has none.
      train_epsilon: whether epsilon is a parameter, 0 at first.
      use_bias: biases of the perceptron.
    """

    name = "GINConv"
    program = convolutions.gin
    pairs = True
    edge_argument = "edge_features"
    hidden_features: int | None = None
    edge_features: int | None = None
    train_epsilon: bool = False
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        (k, m), n = self.widths, self.out_features
        if k != m:
            raise ValueError(f"GINConv: sources and destinations are added and must be equally wide, got {k} and {m}")
        h = n if self.hidden_features is None else self.hidden_features
        specs = {"weight_1": _matrix(k, h), "weight_2": _matrix(h, n)}
        if self.use_bias:
            specs |= {"bias_1": _zeros(h), "bias_2": _zeros(n)}
        if self.train_epsilon:
            specs["epsilon"] = _zeros()
        return specs if self.edge_features is None else specs | {"edge": _matrix(self.edge_features, k)}


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedGCNSpec(ZooSpec):
    """Residual gated graph convolution (arXiv 1711.07553); the equation is in `dejax.rgnn.zoo.gated_gcn`.

    Args:
      edge_features: width of the edge features that the gates read; None: the layer has none.
      use_root, use_bias: adds `x @ root`, and the biases of gate, value and result.
    """

    name = "GatedGCNConv"
    program = convolutions.gated_gcn
    pairs = True
    edge_argument = "edge_features"
    edge_features: int | None = None
    use_root: bool = True
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        (k, m), n = self.widths, self.out_features
        specs = {"gate_dst": _matrix(m, n), "gate_src": _matrix(k, n), "value": _matrix(k, n)}
        if self.edge_features is not None:
            specs["gate_edge"] = _matrix(self.edge_features, n)
        if self.use_root:
            specs["root"] = _matrix(m, n)
        if self.use_bias:
            specs |= {name: _zeros(n) for name in ("gate_bias", "value_bias", "bias")}
        return specs


@dataclass(frozen=True, kw_only=True, slots=True)
class PNASpec(ZooSpec):
    """PNA (arXiv 2004.05718); the equation is in `dejax.rgnn.zoo.pna`.

    Args:
      mean_log_degree: delta, the mean of log(d + 1) over the nodes of the training graphs.
      num_towers: towers T, each with messages as wide as x and a result of out_features / T.
      edge_features: width of the edge features; None: the layer has none.
      use_bias: biases of messages, towers and result.
    """

    name = "PNAConv"
    program = convolutions.pna
    passed = ("mean_log_degree",)
    edge_argument = "edge_features"
    mean_log_degree: float
    num_towers: int = 1
    edge_features: int | None = None
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        k, n, t = self.widths[0], self.out_features, self.num_towers
        if n % t:
            raise ValueError(f"PNAConv: num_towers must divide out_features, got {t} and {n}")
        specs = {
            "message_dst": _matrix(t, k, k),
            "message_src": _matrix(t, k, k),
            "update": _matrix(t, k, n // t),
            "aggregate": _matrix(3, t, 4 * k, n // t),
            "out": _matrix(n, n),
        }
        if self.edge_features is not None:
            specs["message_edge"] = _matrix(t, self.edge_features, k)
        if self.use_bias:
            specs |= {"message_bias": _zeros(t, k), "update_bias": _zeros(t, n // t), "bias": _zeros(n)}
        return specs


@dataclass(frozen=True, kw_only=True, slots=True)
class GATSpec(ZooSpec):
    """GAT (arXiv 1710.10903); the equation is in `dejax.rgnn.zoo.gat`. out_features is the width d of a head.

    Args:
      num_heads: heads H.
      edge_features: width of the edge features that scores read; None: the layer has none.
      negative_slope: of the leaky ReLU on scores.
      concat_heads: the result is [nodes, H * d]; False averages the heads, [nodes, d].
      use_residual, use_bias: adds `x @ residual`, and `bias`.
      attention_dropout: share of the attention coefficients dropped after the softmax while training.
    """

    name = "GATConv"
    program = attention.gat
    passed = ("negative_slope", "concat_heads")
    pairs = True
    edge_argument = "edge_features"
    num_heads: int = 1
    edge_features: int | None = None
    negative_slope: float = 0.2
    concat_heads: bool = True
    use_residual: bool = False
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        (k, m), d, h, c = self.widths, self.out_features, self.num_heads, self.edge_features
        specs = {"weight": _heads(h, k, d)}
        if isinstance(self.in_features, tuple):
            specs["weight_dst"] = _heads(h, m, d)
        vectors: tuple[str, ...] = ("attention_src", "attention_dst")
        if c is not None:
            specs["weight_edge"] = _heads(h, c, d)
            vectors = (*vectors, "attention_edge")
        specs |= {name: ParamSpec((h, d), attention_vector) for name in vectors}
        n = h * d if self.concat_heads else d
        if self.use_residual:
            specs["residual"] = _matrix(m, n)
        return specs | ({"bias": _zeros(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class GATv2Spec(ZooSpec):
    """GATv2 (arXiv 2105.14491); the equation is in `dejax.rgnn.zoo.gatv2`. out_features is the width d of a head.

    Args:
      num_heads, edge_features, negative_slope, concat_heads, use_residual, attention_dropout: as in `GATConv`.
      share_weights: whether sources and destinations have one weight.
      use_bias: biases of both projections and of the result.
    """

    name = "GATv2Conv"
    program = attention.gatv2
    passed = ("negative_slope", "concat_heads")
    pairs = True
    edge_argument = "edge_features"
    num_heads: int = 1
    edge_features: int | None = None
    negative_slope: float = 0.2
    concat_heads: bool = True
    share_weights: bool = False
    use_residual: bool = False
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        (k, m), d, h, c = self.widths, self.out_features, self.num_heads, self.edge_features
        if self.share_weights and k != m:
            raise ValueError(f"GATv2Conv: share_weights needs sources and destinations of one width, got {k} and {m}")
        specs = {"weight_src": _heads(h, k, d), "attention": ParamSpec((h, d), attention_vector)}
        if not self.share_weights:
            specs["weight_dst"] = _heads(h, m, d)
        if c is not None:
            specs["weight_edge"] = _heads(h, c, d)
        n = h * d if self.concat_heads else d
        if self.use_residual:
            specs["residual"] = _matrix(m, n)
        if self.use_bias:
            specs |= {"bias_src": _zeros(h, d), "bias": _zeros(n)}
            if not self.share_weights:
                specs["bias_dst"] = _zeros(h, d)
        return specs


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSpec(ZooSpec):
    """Graph transformer (arXiv 2009.03509); see `dejax.rgnn.zoo.graph_transformer`. out_features is a head's width d.

    Args:
      num_heads, edge_features, concat_heads, attention_dropout: as in `GATConv`.
      use_root: adds `x @ root`.
      use_gate: weighs result and root by a learned gate.
      use_bias: biases of query, key, value and root.
    """

    name = "TransformerConv"
    program = attention.graph_transformer
    passed = ("concat_heads",)
    pairs = True
    edge_argument = "edge_features"
    num_heads: int = 1
    edge_features: int | None = None
    concat_heads: bool = True
    use_root: bool = True
    use_gate: bool = False
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        (k, m), d, h, c = self.widths, self.out_features, self.num_heads, self.edge_features
        if self.use_gate and not self.use_root:
            raise ValueError("TransformerConv: use_gate needs use_root: the gate weighs result and root")
        specs = {"query": _heads(h, m, d), "key": _heads(h, k, d), "value": _heads(h, k, d)}
        if self.use_bias:
            specs |= {f"{name}_bias": _zeros(h, d) for name in ("query", "key", "value")}
        if c is not None:
            specs["edge"] = _heads(h, c, d)
        n = h * d if self.concat_heads else d
        if self.use_root:
            specs["root"] = _matrix(m, n)
            if self.use_bias:
                specs["root_bias"] = _zeros(n)
        return specs | ({"gate": ParamSpec((3, n), attention_vector)} if self.use_gate else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class RGGNNSpec(ZooSpec):
    """Gated graph network with edge types (arXiv 1511.05493); the equations are in `dejax.rgnn.zoo.rggnn`.

    Features narrower than out_features are padded with zeros, as in the paper.

    Args:
      num_edge_types: edge types R; 1 for graphs without types.
      steps: how often the layer is applied.
      use_bias: biases of messages and gates.
    """

    name = "RGGNNConv"
    program = relational.rggnn
    passed = ("steps",)
    num_edge_types: int
    steps: int = 1
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        n, r = self.out_features, self.num_edge_types
        if self.widths[0] > n:
            raise ValueError(f"RGGNNConv: in_features must be at most out_features, got {self.widths[0]} and {n}")
        specs = {"weight": _matrix(r, n, n), "input": _matrix(3, n, n), "hidden": _matrix(3, n, n)}
        if self.use_bias:
            specs |= {"edge_bias": _zeros(r, n), "input_bias": _zeros(3, n), "hidden_bias": _zeros(3, n)}
        return specs

    def run(self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array]) -> Any:
        wide = jnp.pad(x, ((0, 0), (0, self.out_features - x.shape[1])))
        return relational.rggnn(graph, wide, params, steps=self.steps, options=self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompGCNSpec(ZooSpec):
    """CompGCN (arXiv 1911.03082); the equations are in `dejax.rgnn.zoo.compgcn`.

    Args:
      num_edge_types: edge types R.
      directions: for each edge type the number of its weight; None: one weight for all. For a graph of r relations made
        with add_reverse=True, the paper has `(0,) * r + (1,) * r`.
      composition: `"subtract"`, `"multiply"` or `"correlate"`.
      aggregation: `"sum"` or `"mean"`.
      use_loop, use_bias: the term of the node itself, and `bias` [n].
      update_relation: whether a call gives a pair (nodes, relations [R, n]).
    """

    name = "CompGCNConv"
    program = relational.compgcn
    passed = ("directions", "composition", "aggregation")
    num_edge_types: int
    directions: tuple[int, ...] | None = None
    composition: Literal["subtract", "multiply", "correlate"] = "multiply"
    aggregation: Literal["sum", "mean"] = "sum"
    use_loop: bool = True
    use_bias: bool = True
    update_relation: bool = False

    def params(self) -> ParamSpecs:
        k, n, r = self.widths[0], self.out_features, self.num_edge_types
        count = 1 if self.directions is None else max(self.directions, default=0) + 1
        specs = {"relation": _matrix(r, k), "weight": _matrix(count, k, n)}
        if self.use_loop:
            specs |= {"loop": ParamSpec((k,), attention_vector), "weight_loop": _matrix(k, n)}
        if self.update_relation:
            specs["relation_update"] = _matrix(k, n)
        return specs | ({"bias": _zeros(n)} if self.use_bias else {})

    def run(self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array]) -> Any:
        keywords = {name: getattr(self, name) for name in self.passed}
        return relational.compgcn(
            graph, x, params, **keywords, return_relation=self.update_relation, options=self.options
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleHGNSpec(ZooSpec):
    """SimpleHGN (arXiv 2112.14936); the equations are in `dejax.rgnn.zoo.simple_hgn`. out_features is a head's width d.

    The attention of the layer before is an argument of the function, not of the module.

    Args:
      num_edge_types: edge types R.
      num_heads, negative_slope, concat_heads, attention_dropout: as in `GATConv`.
      relation_features: width of the edge types' embeddings.
      normalize: whether rows of the result get norm 1.
      use_residual, use_bias: adds `x @ residual`, and `bias`.
    """

    name = "SimpleHGNConv"
    program = relational.simple_hgn
    passed = ("negative_slope", "normalize", "concat_heads")
    num_edge_types: int
    num_heads: int = 1
    relation_features: int = 64
    negative_slope: float = 0.2
    normalize: bool = False
    concat_heads: bool = True
    use_residual: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        k, d, h, u = self.widths[0], self.out_features, self.num_heads, self.relation_features
        specs = {
            "weight": _heads(h, k, d),
            "edge_embedding": _matrix(self.num_edge_types, u),
            "weight_edge": _heads(h, u, u),
        }
        specs |= {name: ParamSpec((h, d), attention_vector) for name in ("attention_src", "attention_dst")}
        specs["attention_edge"] = ParamSpec((h, u), attention_vector)
        n = h * d if self.concat_heads else d
        if self.use_residual:
            specs["residual"] = _matrix(k, n)
        return specs | ({"bias": _zeros(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRGATSpec(ZooSpec):
    """RGAT as PyTorch Geometric has it, query and key shared by all relations; see `dejax.rgnn.zoo.rgat_shared`.

    out_features is the width d of a head.

    Args:
      num_edge_types: edge types R.
      num_heads, edge_features, negative_slope, concat_heads, use_bias, attention_dropout: as in `GATConv`.
      softmax: `"dst"`, across relations, or `"relation"`, within each.
      mode: `"additive"` or `"multiplicative"`.
    """

    name = "SharedRGATConv"
    program = relational.rgat_shared
    passed = ("softmax", "mode", "negative_slope", "concat_heads")
    edge_argument = "edge_features"
    num_edge_types: int
    num_heads: int = 1
    edge_features: int | None = None
    softmax: Literal["dst", "relation"] = "dst"
    mode: Literal["additive", "multiplicative"] = "additive"
    negative_slope: float = 0.2
    concat_heads: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        k, h, n = self.widths[0], self.num_heads, self.num_heads * self.out_features
        specs = {"weight": _matrix(self.num_edge_types, k, n), "query": _matrix(n, h), "key": _matrix(n, h)}
        if self.edge_features is not None:
            specs |= {"weight_edge": _matrix(self.edge_features, n), "attention_edge": _matrix(n, h)}
        return specs | ({"bias": _zeros(n if self.concat_heads else self.out_features)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class HEATSpec(ZooSpec):
    """HEAT (arXiv 2106.07161); the equations are in `dejax.rgnn.zoo.heat`. out_features is the width of each head.

    Args:
      num_node_types, num_edge_types: T and R.
      edge_features: width of the edge features.
      num_heads, negative_slope, concat_heads, attention_dropout: as in `GATConv`.
      edge_embedding_features, relation_features: widths of the embeddings of edge features and of edge types.
      add_root: adds each node's projection to its result.
      use_bias: biases of projection and value.
    """

    name = "HEATConv"
    program = relational.heat
    passed = ("negative_slope", "concat_heads", "add_root")
    edge_argument = "edge_features"
    num_node_types: int
    num_edge_types: int
    edge_features: int
    num_heads: int = 1
    edge_embedding_features: int = 16
    relation_features: int = 16
    negative_slope: float = 0.2
    concat_heads: bool = True
    add_root: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        k, n, h, t = self.widths[0], self.out_features, self.num_heads, self.num_node_types
        p, u = self.edge_embedding_features, self.relation_features
        if self.edge_features is None:
            raise ValueError("HEATConv: edge_features must be given, [num_edges, width], got None")
        specs = {
            "weight": _matrix(t, k, n),
            "edge_embedding": _matrix(self.num_edge_types, u),
            "weight_edge": _matrix(self.edge_features, p),
            "attention_dst": _matrix(n, h),
            "attention_src": _matrix(n, h),
            "attention_type": _matrix(u, h),
            "attention_edge": _matrix(p, h),
            "value": _matrix(n, n),
            "value_edge": _matrix(p, n),
        }
        if self.use_bias:
            specs |= {"node_bias": _zeros(t, n), "value_bias": _zeros(n)}
        return specs


SPECS: dict[str, type[ZooSpec]] = {
    spec.name: spec
    for spec in (
        GCNSpec,
        SAGESpec,
        GINSpec,
        GatedGCNSpec,
        PNASpec,
        GATSpec,
        GATv2Spec,
        TransformerSpec,
        RGGNNSpec,
        CompGCNSpec,
        SimpleHGNSpec,
        SharedRGATSpec,
        HEATSpec,
    )
}
"""The specification of each layer, by the name of its module."""
