"""For editors and type checkers: the arguments of each layer, as its specification has them.

`pytest --update-golden tests/rgnn/layers/test_signatures.py` writes this file.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dejax.rgnn._linen_layer import LinenLayer
from dejax.rgnn._linen_layer import ProgramModule as ProgramModule
from dejax.rgnn.layers.parameters import Initializer
from dejax.rgnn.options import Options

class CompGCNConv(LinenLayer):
    """CompGCN (arXiv 1911.03082); the equations are in `dejax.rgnn.zoo.compgcn`."""

    def __init__(
        self, features: int, directions: tuple[int, ...] | None = None,
        composition: Literal["subtract", "multiply", "correlate"] = "multiply",
        aggregation: Literal["sum", "mean"] = "sum", use_loop: bool = True, use_bias: bool = True,
        update_relation: bool = False, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class GATConv(LinenLayer):
    """GAT (arXiv 1710.10903); the equation is in `dejax.rgnn.zoo.gat`."""

    def __init__(
        self, features: int, num_heads: int = 1, negative_slope: float = 0.2, concat_heads: bool = True,
        use_residual: bool = False, use_bias: bool = True, attention_dropout: float = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class GATv2Conv(LinenLayer):
    """GATv2 (arXiv 2105.14491); the equation is in `dejax.rgnn.zoo.gatv2`."""

    def __init__(
        self, features: int, num_heads: int = 1, negative_slope: float = 0.2, concat_heads: bool = True,
        share_weights: bool = False, use_residual: bool = False, use_bias: bool = True,
        attention_dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class GCNConv(LinenLayer):
    """GCN (arXiv 1609.02907); the equation is in `dejax.rgnn.zoo.gcn`."""

    def __init__(
        self, features: int, add_self_loops: bool = True, use_bias: bool = True, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, parent: Any = ...,
        name: str | None = None, *, deterministic: bool | None = None
    ) -> None: ...

class GINConv(LinenLayer):
    """GIN (arXiv 1810.00826) and, with edge features, GINE (arXiv 1905.12265); see `dejax.rgnn.zoo.gin`."""

    def __init__(
        self, features: int, hidden_features: int | None = None, train_epsilon: bool = False,
        use_bias: bool = True, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class GatedGCNConv(LinenLayer):
    """Residual gated graph convolution (arXiv 1711.07553); the equation is in `dejax.rgnn.zoo.gated_gcn`."""

    def __init__(
        self, features: int, use_root: bool = True, use_bias: bool = True, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, parent: Any = ...,
        name: str | None = None, *, deterministic: bool | None = None
    ) -> None: ...

class HEATConv(LinenLayer):
    """HEAT (arXiv 2106.07161); the equations are in `dejax.rgnn.zoo.heat`."""

    def __init__(
        self, features: int, num_heads: int = 1, edge_embedding_features: int = 16, relation_features: int = 16,
        negative_slope: float = 0.2, concat_heads: bool = True, add_root: bool = True, use_bias: bool = True,
        attention_dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class HGTConv(LinenLayer):
    """HGT layer (arXiv 2003.01332) without temporal encoding; the equations are in `dejax.rgnn.library.hgt`."""

    def __init__(
        self, features: int, num_heads: int = 1, head_features: int | None = None, use_bias: bool = True,
        use_skip: bool | None = None, dropout: float = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, parent: Any = ...,
        name: str | None = None, *, deterministic: bool | None = None
    ) -> None: ...

class PNAConv(LinenLayer):
    """PNA (arXiv 2004.05718); the equation is in `dejax.rgnn.zoo.pna`."""

    def __init__(
        self, features: int, mean_log_degree: float, num_towers: int = 1, use_bias: bool = True,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class RGATConv(LinenLayer):
    """RGAT layer (arXiv 1904.05811), additive attention; the equations are in `dejax.rgnn.library.rgat`."""

    def __init__(
        self, features: int, num_heads: int = 1, softmax: Literal["dst", "relation"] = "dst",
        negative_slope: float = 0.2, concat_heads: bool = True, use_bias: bool = True,
        attention_dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class RGCNConv(LinenLayer):
    """R-GCN layer (arXiv 1703.06103); the equations are in `dejax.rgnn.library.rgcn`."""

    def __init__(
        self, features: int, num_bases: int | None = None, num_blocks: int | None = None,
        normalization: Literal["mean", "sum", "none"] = "mean", use_root: bool = True, use_bias: bool = True,
        edge_dropout: float = 0.0, self_loop_dropout: float = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, parent: Any = ...,
        name: str | None = None, *, deterministic: bool | None = None
    ) -> None: ...

class RGGNNConv(LinenLayer):
    """Gated graph network with edge types (arXiv 1511.05493); the equations are in `dejax.rgnn.zoo.rggnn`."""

    def __init__(
        self, features: int, steps: int = 1, use_bias: bool = True, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, parent: Any = ...,
        name: str | None = None, *, deterministic: bool | None = None
    ) -> None: ...

class SAGEConv(LinenLayer):
    """GraphSAGE (arXiv 1706.02216); the equation is in `dejax.rgnn.zoo.graphsage`."""

    def __init__(
        self, features: int, aggregation: Literal["mean", "max", "sum"] = "mean", pool_features: int | None = None,
        normalize: bool = False, use_root: bool = True, use_bias: bool = True, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, backend: str = "auto", precision: str | None = None,
        options: Options | None = None, initializers: Mapping[str, Initializer] | None = None, parent: Any = ...,
        name: str | None = None, *, deterministic: bool | None = None
    ) -> None: ...

class SharedRGATConv(LinenLayer):
    """RGAT as PyTorch Geometric has it, query and key shared by all relations; see `dejax.rgnn.zoo.rgat_shared`."""

    def __init__(
        self, features: int, num_heads: int = 1, softmax: Literal["dst", "relation"] = "dst",
        mode: Literal["additive", "multiplicative"] = "additive", negative_slope: float = 0.2,
        concat_heads: bool = True, use_bias: bool = True, attention_dropout: float = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class SimpleHGNConv(LinenLayer):
    """SimpleHGN (arXiv 2112.14936); the equations are in `dejax.rgnn.zoo.simple_hgn`."""

    def __init__(
        self, features: int, num_heads: int = 1, relation_features: int = 64, negative_slope: float = 0.2,
        normalize: bool = False, concat_heads: bool = True, use_residual: bool = True, use_bias: bool = True,
        attention_dropout: float = 0.0, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto", precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

class TransformerConv(LinenLayer):
    """Graph transformer (arXiv 2009.03509); see `dejax.rgnn.zoo.graph_transformer`."""

    def __init__(
        self, features: int, num_heads: int = 1, concat_heads: bool = True, use_root: bool = True,
        use_gate: bool = False, use_bias: bool = True, attention_dropout: float = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, backend: str = "auto",
        precision: str | None = None, options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None, parent: Any = ..., name: str | None = None, *,
        deterministic: bool | None = None
    ) -> None: ...

def from_pyg(
    layer: Any, *, graph_has_self_loops: bool = False, options: Options | None = None
) -> tuple[Any, dict[str, dict[str, Array]]]: ...
