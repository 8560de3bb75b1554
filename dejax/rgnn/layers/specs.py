"""Specifications of layers, without Flax: the shapes and initialisers of parameters, and the pure function.

`dejax.rgnn.nnx` and `dejax.rgnn.linen` are bindings of these specifications. Both take names, shapes and initialisers
of parameters from here and call the same function, so that the same parameters (and the same dropout key) give the same
values in both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jax import Array
from jax.nn.initializers import ones, zeros
from jax.typing import DTypeLike

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import dropout, library
from dejax.rgnn.layers.parameters import (
    GLOROT,
    PER_MATRIX,
    PER_TYPE_HEADS,
    OneHotGlorot,
    ParamSpec,
    ParamSpecs,
    attention_vector,
    cast,
    check_size,
)
from dejax.rgnn.options import Options

Normalization: TypeAlias = Literal["mean", "sum", "none"]


def _positive(owner: str, **sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None:
            check_size(owner, name, size)


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
        raise ValueError(
            f"{owner}: x must have shape [num_nodes, in_features] = {[graph.num_nodes, width]}, got {given}"
        )
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
            raise ValueError(f"RGCNConv: normalization must be 'mean', 'sum' or 'none', got {self.normalization!r}")
        if self.num_bases is not None and self.num_blocks is not None:
            raise ValueError("RGCNConv: give num_bases or num_blocks, not both: weights have one form")
        if self.featureless:
            if self.num_blocks is not None:
                raise ValueError("RGCNConv: num_blocks needs node features, got in_features=None; use num_bases")
            rows = self.num_source_pairs if self.num_bases is None else 1
            if self.num_nodes is None or rows is None:
                raise ValueError(
                    "RGCNConv without in_features needs num_nodes and num_source_pairs of its graph; "
                    "RGCNConv.featureless(graph, out_features, ...) fills them in"
                )
        elif self.num_nodes is not None or self.num_source_pairs is not None:
            raise ValueError("RGCNConv: num_nodes and num_source_pairs are for in_features=None only")
        elif self.num_blocks and ((self.in_features or 0) % self.num_blocks or self.out_features % self.num_blocks):
            raise ValueError(
                f"RGCNConv: num_blocks must divide both widths, got num_blocks={self.num_blocks}, "
                f"in_features={self.in_features}, out_features={self.out_features}"
            )
        if self.self_loop_dropout and not self.use_root:
            raise ValueError("RGCNConv: self_loop_dropout must be 0 where use_root is False: it drops the root term")

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
            # Glorot over [R, B], as in the authors' code; the paper does not specify it.
            specs["coefficients"] = ParamSpec((r, b), GLOROT)
        if self.use_root:
            specs["root"] = ParamSpec((k, n), GLOROT) if k is not None else ParamSpec((self.num_nodes or 0, n), one_hot)
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
            out = library.rgcn(graph, x, params, normalization=self.normalization, options=self.options)
        else:
            rates = (self.edge_dropout, self.self_loop_dropout)
            keywords: dict[str, Any] = {"normalization": self.normalization, "options": self.options}
            out = dropout.rgcn(graph, x, params, key, *rates, **keywords)
        # Degrees are float32, so that counts above 256 are exact; a mean of bfloat16 messages is therefore float32.
        return out.astype(next(iter(params.values())).dtype)


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
                f"RGATConv: softmax must be 'dst' (over all incoming edges of a node) or 'relation' (over those of one "
                f"edge type), got {self.softmax!r}"
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
        return dropout.rgat(graph, x, params, key, self.attention_dropout, **keywords)


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
                f"out_features={self.out_features}; or give head_features"
            )
        if self.use_skip and self.in_features != self.out_features:
            raise ValueError(
                f"HGTConv: in_features must equal out_features for the skip connection, got {self.in_features} and "
                f"{self.out_features}; use_skip=None has it only where they are equal"
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
        return dropout.hgt(graph, x, params, key, self.dropout, options=self.options)


LayerSpec: TypeAlias = RGCNSpec | RGATSpec | HGTSpec
