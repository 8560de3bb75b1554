"""What a layer is, without Flax: its parameters' shapes and initialisers, and its pure function.

`dejax.rgnn.nnx` and `dejax.rgnn.linen` are faces of these specs; both name, shape and initialise parameters here, and call
the same function with them, so that the same parameters (and the same dropout key) give the same numbers in both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn.initializers import glorot_uniform, ones, zeros
from jax.typing import DTypeLike

from dejax.rgnn import _dropout, library
from dejax.rgnn.graph import RelGraph
from dejax.rgnn.options import Options
from dejax.rgnn.program import Program

Initializer: TypeAlias = Callable[..., Array]
Normalization: TypeAlias = Literal["mean", "sum", "none"]

# Glorot (uniform) for each relation's own matrix: leading axes count types, heads, bases or blocks and are no fan.
PER_MATRIX = {
    3: glorot_uniform(in_axis=1, out_axis=2, batch_axis=(0,)),
    4: glorot_uniform(in_axis=2, out_axis=3, batch_axis=(0, 1)),
}
# [types, heads, k, d] is one k x (heads d) matrix a type.
PER_TYPE_HEADS = glorot_uniform(in_axis=2, out_axis=(1, 3), batch_axis=(0,))
GLOROT = glorot_uniform(in_axis=0, out_axis=1)


def attention_vector(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    """Glorot (uniform) for vectors [..., d] that map d features to one score."""
    limit = math.sqrt(6.0 / (shape[-1] + 1))
    return jax.random.uniform(key, shape, dtype, -limit, limit)


@dataclass(frozen=True, slots=True)
class OneHotGlorot:
    """Glorot (uniform) of the [num_nodes, n] matrix that a one-hot input would be multiplied by, for any choice of its rows."""

    num_nodes: int

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        limit = math.sqrt(6.0 / (self.num_nodes + shape[-1]))
        return jax.random.uniform(key, shape, dtype, -limit, limit)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Shape of one parameter and what draws it: `init(key, shape, dtype)`."""

    shape: tuple[int, ...]
    init: Initializer


ParamSpecs: TypeAlias = dict[str, ParamSpec]


def with_initializers(specs: ParamSpecs, initializers: Mapping[str, Initializer] | None) -> ParamSpecs:
    """The same parameters, some drawn by an initialiser of the user's.

    Raises:
      ValueError: `initializers` names a parameter that the layer does not have.
    """
    unknown = sorted(set(initializers or ()) - set(specs))
    if unknown:
        raise ValueError(f"initializers: this layer has parameters {sorted(specs)}, got an initialiser for {unknown}")
    return {name: ParamSpec(s.shape, (initializers or {}).get(name, s.init)) for name, s in specs.items()}


def resolve_options(
    backend: str, precision: str | None, options: Options | None, base: Options | None = None
) -> Options:
    """The compiler options of a layer: `base` with the two that matter most changed where they are said, or `options`."""
    if options is None:
        options = Options() if base is None else base
        if backend != "auto":
            options = dataclasses.replace(options, backend=backend)
        return options if precision is None else dataclasses.replace(options, precision=precision)
    if backend != "auto" or precision is not None:
        raise ValueError(
            f"options={options} already says backend and precision, got backend={backend!r} and precision={precision!r} "
            "beside it; give one or the other"
        )
    return options


def cast(tree: Any, dtype: DTypeLike | None) -> Any:
    """Floating-point leaves in `dtype`; with None, in the type that all of them promote to (Flax's rule)."""

    def inexact(x: Any) -> bool:
        return jnp.issubdtype(jnp.result_type(x), jnp.inexact)

    leaves = [x for x in jax.tree.leaves(tree) if inexact(x)]
    if dtype is None and leaves:
        dtype = jnp.result_type(*leaves)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if inexact(x) else x, tree)


def _positive(owner: str, **sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{owner}: {name} must be at least 1, got {size}")


def _rate(owner: str, **rates: float) -> None:
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{owner}: {name} is the share dropped and must be in [0, 1), got {rate}")


def _same(owner: str, graph: RelGraph, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and getattr(graph, name) != count:
            raise ValueError(f"{owner} was made for {name}={count}, got a graph with {name}={getattr(graph, name)}")


def _features(owner: str, graph: RelGraph, x: Array | None, width: int) -> Array:
    if x is None or x.ndim != 2 or x.shape != (graph.num_nodes, width):
        given = "None" if x is None else f"an array of shape {x.shape}"
        raise ValueError(f"{owner}: x must have shape (num_nodes, in_features) = ({graph.num_nodes}, {width}), got {given}")
    return x


@dataclass(frozen=True, kw_only=True, slots=True)
class RGCNSpec:
    """R-GCN (arXiv 1703.06103, equation 2), in one of its three weight forms; see `library.rgcn` for the equations."""

    in_features: int | None
    out_features: int
    num_edge_types: int
    num_bases: int | None = None
    num_blocks: int | None = None
    normalization: Normalization = "mean"
    use_root: bool = True
    use_bias: bool = True
    num_nodes: int | None = None
    num_source_pairs: int | None = None
    edge_dropout: float = 0.0
    self_loop_dropout: float = 0.0
    dtype: DTypeLike | None = None
    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        _positive("RGCNConv", out_features=self.out_features, num_edge_types=self.num_edge_types)
        _positive("RGCNConv", in_features=self.in_features, num_bases=self.num_bases, num_blocks=self.num_blocks)
        _rate("RGCNConv", edge_dropout=self.edge_dropout, self_loop_dropout=self.self_loop_dropout)
        if self.normalization not in ("mean", "sum", "none"):
            raise ValueError(f"RGCNConv: normalization is 'mean', 'sum' or 'none', got {self.normalization!r}")
        if self.num_bases is not None and self.num_blocks is not None:
            raise ValueError("RGCNConv takes num_bases or num_blocks, not both: weights are one or the other (section 2.2)")
        if self.featureless:
            if self.num_blocks is not None:
                raise ValueError("RGCNConv: num_blocks needs node features, got in_features=None; use num_bases or neither")
            rows = self.num_source_pairs if self.num_bases is None else 1
            if self.num_nodes is None or rows is None:
                raise ValueError(
                    "RGCNConv without in_features needs num_nodes and num_source_pairs of its graph; "
                    "RGCNConv.featureless(graph, out_features, ...) fills them in"
                )
        elif self.num_nodes is not None or self.num_source_pairs is not None:
            raise ValueError("RGCNConv: num_nodes and num_source_pairs are for in_features=None (nodes without features) only")
        elif self.num_blocks is not None and (self.in_features % self.num_blocks or self.out_features % self.num_blocks):
            raise ValueError(
                f"RGCNConv: num_blocks must divide both widths, got num_blocks={self.num_blocks}, "
                f"in_features={self.in_features}, out_features={self.out_features}"
            )
        if self.self_loop_dropout and not self.use_root:
            raise ValueError("RGCNConv: self_loop_dropout drops what the root weight gives, and use_root is False")

    @property
    def featureless(self) -> bool:
        return self.in_features is None

    @property
    def stochastic(self) -> bool:
        return bool(self.edge_dropout or self.self_loop_dropout)

    def params(self) -> ParamSpecs:
        k, n, r, b = self.in_features, self.out_features, self.num_edge_types, self.num_bases
        specs: ParamSpecs = {}
        if k is None:
            assert self.num_nodes is not None
            one_hot = OneHotGlorot(self.num_nodes)
            if b is None:
                specs["weight"] = ParamSpec((self.num_source_pairs or 0, n), one_hot)
            else:
                specs["bases"] = ParamSpec((self.num_nodes, b, n), one_hot)
        elif self.num_blocks is not None:
            blocks = self.num_blocks
            specs["blocks"] = ParamSpec((r, blocks, k // blocks, n // blocks), PER_MATRIX[4])
        elif b is not None:
            specs["bases"] = ParamSpec((b, k, n), PER_MATRIX[3])
        else:
            specs["weight"] = ParamSpec((r, k, n), PER_MATRIX[3])
        if b is not None:
            # Glorot over [R, B], as in the authors' program; the paper does not say.
            specs["coefficients"] = ParamSpec((r, b), GLOROT)
        if self.use_root:
            specs["root"] = ParamSpec((self.num_nodes, n), one_hot) if k is None else ParamSpec((k, n), GLOROT)
        if self.use_bias:
            specs["bias"] = ParamSpec((n,), zeros)
        return specs

    def __call__(self, graph: RelGraph, x: Array | None, params: dict[str, Array], key: Array | None = None) -> Array:
        """[num_nodes, out_features]; dropout where `key` is given."""
        _same("RGCNConv", graph, num_edge_types=self.num_edge_types)
        if self.in_features is None:
            _same("RGCNConv", graph, num_nodes=self.num_nodes)
            if self.num_bases is None:
                _same("RGCNConv", graph, num_source_pairs=self.num_source_pairs)
            if x is not None:
                raise ValueError(f"RGCNConv without in_features takes no x, got an array of shape {x.shape}")
        else:
            x = _features("RGCNConv", graph, x, self.in_features)
        x, params = cast((x, params), self.dtype)
        if key is None or not self.stochastic:
            return library.rgcn(graph, x, params, normalization=self.normalization, options=self.options)
        rates = (self.edge_dropout, self.self_loop_dropout)
        return _dropout.rgcn(graph, x, params, key, *rates, normalization=self.normalization, options=self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class RGATSpec:
    """RGAT (arXiv 1904.05811), additive attention, across relations or within each; see `library.rgat`."""

    in_features: int
    out_features: int
    num_edge_types: int
    num_heads: int = 1
    softmax: Literal["dst", "relation"] = "dst"
    negative_slope: float = 0.2
    concat_heads: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0
    dtype: DTypeLike | None = None
    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        _positive("RGATConv", in_features=self.in_features, out_features=self.out_features)
        _positive("RGATConv", num_edge_types=self.num_edge_types, num_heads=self.num_heads)
        _rate("RGATConv", attention_dropout=self.attention_dropout)
        if self.softmax not in ("dst", "relation"):
            raise ValueError(
                f"RGATConv: softmax is over 'dst' (all incoming edges of a node) or 'relation' (those of one edge type), "
                f"got {self.softmax!r}"
            )

    @property
    def stochastic(self) -> bool:
        return self.attention_dropout > 0

    def params(self) -> ParamSpecs:
        r, h, k, d = self.num_edge_types, self.num_heads, self.in_features, self.out_features
        specs = {
            "weight": ParamSpec((r, h, k, d), PER_TYPE_HEADS),
            "attention_src": ParamSpec((r, h, d), attention_vector),
            "attention_dst": ParamSpec((r, h, d), attention_vector),
        }
        if self.use_bias:
            specs["bias"] = ParamSpec((h * d if self.concat_heads else d,), zeros)
        return specs

    def __call__(self, graph: RelGraph, x: Array | None, params: dict[str, Array], key: Array | None = None) -> Array:
        """[num_nodes, num_heads * out_features], or [num_nodes, out_features] where heads are averaged."""
        _same("RGATConv", graph, num_edge_types=self.num_edge_types)
        x, params = cast((_features("RGATConv", graph, x, self.in_features), params), self.dtype)
        keywords: dict[str, Any] = {
            "softmax": self.softmax,
            "negative_slope": self.negative_slope,
            "concat_heads": self.concat_heads,
            "options": self.options,
        }
        if key is None or not self.stochastic:
            return library.rgat(graph, x, params, **keywords)
        return _dropout.rgat(graph, x, params, key, self.attention_dropout, **keywords)


@dataclass(frozen=True, kw_only=True, slots=True)
class HGTSpec:
    """HGT (arXiv 2003.01332, equations 1 to 5), without the temporal encoding; see `library.hgt`."""

    in_features: int
    out_features: int
    num_node_types: int
    num_edge_types: int
    num_heads: int = 1
    head_features: int | None = None
    use_bias: bool = True
    use_skip: bool | None = None
    dropout: float = 0.0
    dtype: DTypeLike | None = None
    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        _positive("HGTConv", in_features=self.in_features, out_features=self.out_features, num_heads=self.num_heads)
        _positive("HGTConv", num_node_types=self.num_node_types, num_edge_types=self.num_edge_types)
        _positive("HGTConv", head_features=self.head_features)
        _rate("HGTConv", dropout=self.dropout)
        if self.head_features is None and self.out_features % self.num_heads:
            raise ValueError(
                f"HGTConv: num_heads must divide out_features, got num_heads={self.num_heads}, "
                f"out_features={self.out_features}; or say head_features"
            )
        if self.use_skip and self.in_features != self.out_features:
            raise ValueError(
                f"HGTConv: the skip connection adds x to the result and needs in_features == out_features, "
                f"got {self.in_features} and {self.out_features}; use_skip=None takes it only where they are equal"
            )

    @property
    def skip(self) -> bool:
        return self.in_features == self.out_features if self.use_skip is None else self.use_skip

    @property
    def stochastic(self) -> bool:
        return self.dropout > 0

    def params(self) -> ParamSpecs:
        t, r, h, k, n = self.num_node_types, self.num_edge_types, self.num_heads, self.in_features, self.out_features
        d = n // h if self.head_features is None else self.head_features
        specs: ParamSpecs = {}
        for name in ("key", "query", "value"):
            specs[name] = ParamSpec((t, h, k, d), PER_TYPE_HEADS)
            if self.use_bias:
                specs[f"{name}_bias"] = ParamSpec((t, h, d), zeros)
        specs["relation_attention"] = ParamSpec((r, h, d, d), PER_MATRIX[4])
        specs["relation_message"] = ParamSpec((r, h, d, d), PER_MATRIX[4])
        specs["prior"] = ParamSpec((r, h), ones)
        specs["out"] = ParamSpec((t, h * d, n), PER_MATRIX[3])
        if self.use_bias:
            specs["out_bias"] = ParamSpec((t, n), zeros)
        if self.skip:
            specs["skip"] = ParamSpec((t,), ones)
        return specs

    def __call__(self, graph: RelGraph, x: Array | None, params: dict[str, Array], key: Array | None = None) -> Array:
        """[num_nodes, out_features]; dropout where `key` is given."""
        _same("HGTConv", graph, num_edge_types=self.num_edge_types, num_node_types=self.num_node_types)
        x, params = cast((_features("HGTConv", graph, x, self.in_features), params), self.dtype)
        if key is None or not self.stochastic:
            return library.hgt(graph, x, params, options=self.options)
        return _dropout.hgt(graph, x, params, key, self.dropout, options=self.options)


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A relational program and those of its arguments that are parameters."""

    program: Program
    owned: tuple[tuple[str, ParamSpec], ...]
    dtype: DTypeLike | None
    options: Options

    @classmethod
    def make(
        cls,
        program: Any,
        params: Mapping[str, tuple[tuple[int, ...], Initializer]],
        dtype: DTypeLike | None,
        backend: str,
        precision: str | None,
        options: Options | None,
    ) -> ProgramSpec:
        """From a mapping of name to (shape, initialiser); options are the program's own unless others are given.

        Raises:
          TypeError: `program` is no program, or a value of `params` no such pair.
          ValueError: a parameter's name means something else in a call of a program.
        """
        if not isinstance(program, Program):
            raise TypeError(f"ProgramModule takes what @rgnn.program made, got {type(program).__name__}")
        for name, value in params.items():
            if name in ("graph", "options"):
                raise ValueError(f"ProgramModule: a parameter cannot be named {name!r}, which is a keyword of every program")
            if not (isinstance(value, tuple) and len(value) == 2 and callable(value[1])):
                raise TypeError(
                    f"ProgramModule: params[{name!r}] must be (shape, initialiser), for instance "
                    f"((8, 16), jax.nn.initializers.glorot_uniform()), got {value!r}"
                )
        owned = tuple((name, ParamSpec(tuple(shape), init)) for name, (shape, init) in params.items())
        return cls(program, owned, dtype, resolve_options(backend, precision, options, program.options))

    @property
    def params(self) -> ParamSpecs:
        return dict(self.owned)

    def __call__(self, graph: RelGraph, inputs: tuple[Any, ...], params: dict[str, Array]) -> Any:
        inputs, params = cast((inputs, params), self.dtype)
        return self.program(graph, *inputs, **params, options=self.options)


LayerSpec: TypeAlias = RGCNSpec | RGATSpec | HGTSpec


def params_to_linen(module: Any) -> dict[str, Any]:
    """The parameters of an nnx module as linen variables, `{"params": {...}}`.

    Names are the attribute names, so a model of several layers needs the same names in both, as `linen.Module` gives them
    (`self.first` in `setup`, or `name="first"`).

    Args:
      module: an `nnx.Module`, or an `nnx.State` of parameters.
    """
    from flax import nnx

    state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
    return {"params": nnx.to_pure_dict(state)}


def params_from_linen(module: Any, variables: Mapping[str, Any]) -> None:
    """Writes linen variables into the parameters of an nnx module, in place.

    Args:
      module: an `nnx.Module` whose parameters have the names and shapes of `variables["params"]`.
      variables: linen variables, `{"params": {...}}`.

    Raises:
      ValueError: names or shapes differ.
    """
    from flax import nnx

    state = nnx.state(module, nnx.Param)
    mine = _flat(nnx.to_pure_dict(state))
    given = _flat(variables["params"])
    if mine.keys() != given.keys():
        raise ValueError(
            f"variables['params'] has {sorted(given.keys() - mine.keys())} that the module lacks, "
            f"and lacks {sorted(mine.keys() - given.keys())}"
        )
    for name, value in given.items():
        if jnp.shape(value) != jnp.shape(mine[name]):
            raise ValueError(f"parameter {name!r} has shape {jnp.shape(mine[name])}, got {jnp.shape(value)}")
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, dict(variables["params"])))
    nnx.update(module, state)


def _flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(dict(tree))}
