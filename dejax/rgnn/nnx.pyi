"""For editors and type checkers: the arguments of each layer, as its specification has them.

`pytest --update-golden tests/rgnn/layers/test_signatures.py` writes this file.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dejax.rgnn._nnx_layer import NnxLayer
from dejax.rgnn._nnx_layer import ProgramModule as ProgramModule
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers.parameters import Initializer
from dejax.rgnn.layers.parameters import params_from_linen as params_from_linen
from dejax.rgnn.layers.parameters import params_to_linen as params_to_linen
from dejax.rgnn.options import Options

class CompGCNConv(NnxLayer):
    """CompGCN (arXiv 1911.03082, equations 2 to 4): messages combine a neighbour with its edge type's embedding."""

    def __init__(
        self, in_features: int, out_features: int, num_edge_types: int, *,
        directions: tuple[int, ...] | None = None,
        composition: Literal["subtract", "multiply", "correlate"] = "multiply",
        aggregation: Literal["sum", "mean"] = "sum", use_loop: bool = True, use_bias: bool = True,
        update_relation: bool = False, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class GATConv(NnxLayer):
    """Graph attention network, GAT (arXiv 1710.10903, equations 3 to 6)."""

    def __init__(
        self, in_features: int | tuple[int, int], out_features: int, *, num_heads: int = 1,
        edge_features: int | None = None, negative_slope: float = 0.2, concat_heads: bool = True,
        use_residual: bool = False, use_bias: bool = True, attention_dropout: float = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class GATv2Conv(NnxLayer):
    """Graph attention, second version, GATv2 (arXiv 2105.14491, equation 7)."""

    def __init__(
        self, in_features: int | tuple[int, int], out_features: int, *, num_heads: int = 1,
        edge_features: int | None = None, negative_slope: float = 0.2, concat_heads: bool = True,
        share_weights: bool = False, use_residual: bool = False, use_bias: bool = True,
        attention_dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class GCNConv(NnxLayer):
    """Graph convolution, GCN (arXiv 1609.02907, equation 2)."""

    def __init__(
        self, in_features: int, out_features: int, *, add_self_loops: bool = True, use_bias: bool = True,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class GINConv(NnxLayer):
    """Graph isomorphism network, GIN (arXiv 1810.00826, equation 4.1); with edge features GINE (arXiv 1905.12265)."""

    def __init__(
        self, in_features: int | tuple[int, int], out_features: int, *, hidden_features: int | None = None,
        edge_features: int | None = None, train_epsilon: bool = False, use_bias: bool = True,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class GatedGCNConv(NnxLayer):
    """Residual gated graph convolution (arXiv 1711.07553, equations 11 and 12)."""

    def __init__(
        self, in_features: int | tuple[int, int], out_features: int, *, edge_features: int | None = None,
        use_root: bool = True, use_bias: bool = True, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class HEATConv(NnxLayer):
    """HEAT, heterogeneous edge-enhanced attention (arXiv 2106.07161, equations 4 to 8)."""

    def __init__(
        self, in_features: int, out_features: int, num_node_types: int, num_edge_types: int, edge_features: int, *,
        num_heads: int = 1, edge_embedding_features: int = 16, relation_features: int = 16,
        negative_slope: float = 0.2, concat_heads: bool = True, add_root: bool = True, use_bias: bool = True,
        attention_dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class HGTConv(NnxLayer):
    """Heterogeneous graph transformer, HGT (arXiv 2003.01332, equations 3 to 5), without temporal encoding."""

    def __init__(
        self, in_features: int, out_features: int, num_node_types: int, num_edge_types: int, *, num_heads: int = 1,
        head_features: int | None = None, use_bias: bool = True, use_skip: bool | None = None,
        dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class PNAConv(NnxLayer):
    """Principal neighbourhood aggregation, PNA (arXiv 2004.05718, equations 5, 7 and 8)."""

    def __init__(
        self, in_features: int, out_features: int, mean_log_degree: float, *, num_towers: int = 1,
        edge_features: int | None = None, use_bias: bool = True, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class RGATConv(NnxLayer):
    """Relational graph attention, RGAT, with additive attention (arXiv 1904.05811, section 2.2)."""

    def __init__(
        self, in_features: int, out_features: int, num_edge_types: int, *, num_heads: int = 1,
        softmax: Literal["dst", "relation"] = "dst", negative_slope: float = 0.2, concat_heads: bool = True,
        use_bias: bool = True, attention_dropout: float = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class RGCNConv(NnxLayer):
    """Relational graph convolution, R-GCN (arXiv 1703.06103, equation 2), with a weight matrix for each edge type."""

    def __init__(
        self, in_features: int | None, out_features: int, num_edge_types: int, *, num_bases: int | None = None,
        num_blocks: int | None = None, normalization: Literal["mean", "sum", "none"] = "mean",
        use_root: bool = True, use_bias: bool = True, num_nodes: int | None = None,
        num_source_pairs: int | None = None, edge_dropout: float = 0.0, self_loop_dropout: float = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...
    @classmethod
    def featureless(
        cls, graph: RelGraph, out_features: int, *, rngs: nnx.Rngs, **keywords: Any
    ) -> RGCNConv: ...

class RGGNNConv(NnxLayer):
    """Gated graph neural network with a weight matrix for each edge type (arXiv 1511.05493, equations 2 to 6)."""

    def __init__(
        self, in_features: int, out_features: int, num_edge_types: int, *, steps: int = 1, use_bias: bool = True,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class SAGEConv(NnxLayer):
    """GraphSAGE (arXiv 1706.02216, algorithm 1), without its activation."""

    def __init__(
        self, in_features: int | tuple[int, int], out_features: int, *,
        aggregation: Literal["mean", "max", "sum"] = "mean", pool_features: int | None = None,
        normalize: bool = False, use_root: bool = True, use_bias: bool = True, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class SharedRGATConv(NnxLayer):
    """RGAT (arXiv 1904.05811) in the form of PyTorch Geometric: all edge types share the query and key matrices."""

    def __init__(
        self, in_features: int, out_features: int, num_edge_types: int, *, num_heads: int = 1,
        edge_features: int | None = None, softmax: Literal["dst", "relation"] = "dst",
        mode: Literal["additive", "multiplicative"] = "additive", negative_slope: float = 0.2,
        concat_heads: bool = True, use_bias: bool = True, attention_dropout: float = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class SimpleHGNConv(NnxLayer):
    """SimpleHGN (arXiv 2112.14936, section 5): GAT whose scores also read an embedding r_t of the edge's type t."""

    def __init__(
        self, in_features: int, out_features: int, num_edge_types: int, *, num_heads: int = 1,
        relation_features: int = 64, negative_slope: float = 0.2, normalize: bool = False,
        concat_heads: bool = True, use_residual: bool = True, use_bias: bool = True,
        attention_dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

class TransformerConv(NnxLayer):
    """Graph transformer, also known as UniMP (arXiv 2009.03509, equations 3 to 5)."""

    def __init__(
        self, in_features: int | tuple[int, int], out_features: int, *, num_heads: int = 1,
        edge_features: int | None = None, concat_heads: bool = True, use_root: bool = True, use_gate: bool = False,
        use_bias: bool = True, attention_dropout: float = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, rngs: nnx.Rngs
    ) -> None: ...

def from_pyg(
    layer: Any, *, graph_has_self_loops: bool = False, options: Options | None = None, rngs: nnx.Rngs | None = None
) -> Any: ...
