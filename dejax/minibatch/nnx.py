"""Flax nnx modules for heterogeneous graphs: dicts by node type in, dicts by node type out.

    from dejax.minibatch import nnx as mb
    from dejax.rgnn.nnx import RGATConv

    layers = [RGATConv(64, 16, num_relations, num_heads=4, rngs=rngs) for _ in range(2)]
    model = mb.HeteroGNN({"paper": 128, "author": 32}, 64, layers, rngs=rngs)
    outputs = model(make_blocks(sample), x_dict)  # or model(graph, x_dict) on a full graph

Layers are any modules that are called as `layer(graph, x)`: those of `dejax.rgnn.nnx`, and `ProgramModule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dejax._optional import optional
from dejax.minibatch import _stages
from dejax.minibatch._stages import Graphs

with optional("flax", of="dejax.minibatch.nnx"):
    from flax import nnx

__all__ = ["HeteroGNN", "HeteroLayer", "InputProjection"]


class InputProjection(nnx.Module):
    """Maps the features of each node type to one width by a linear layer of its own: y_v = x_v W_t(v) + b_t(v).

    t(v) is the type of node v. A call takes {node type: [nodes, width]} and returns {node type: [nodes, out_features]}.

    Args:
      in_features: width of the features of each node type.
      out_features: width of the result.
      use_bias: whether to add b.
      dtype: dtype of the computation; None: the dtype to which x and the parameters promote.
      param_dtype: dtype of the parameters.
      rngs: random streams; `params` is used.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from dejax.minibatch.nnx import InputProjection
    >>> project = InputProjection({"author": 4, "paper": 6}, 8, rngs=nnx.Rngs(0))
    >>> found = project({"author": jnp.ones((2, 4)), "paper": jnp.ones((3, 6))})
    >>> {name: rows.shape for name, rows in found.items()}
    {'author': (2, 8), 'paper': (3, 8)}
    """

    def __init__(
        self,
        in_features: Mapping[str, int],
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features = tuple(in_features.items())
        for name, width in self.in_features:
            linear = nnx.Linear(width, out_features, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            setattr(self, f"type_{name}", linear)

    def __call__(self, x: Mapping[str, Array]) -> dict[str, Array]:
        """[nodes, out_features] by node type.

        Args:
          x: [nodes, width] by node type; types may be missing.
        """
        _stages.check_types(x, dict(self.in_features))
        return {name: getattr(self, f"type_{name}")(rows) for name, rows in x.items()}


class HeteroLayer(nnx.Module):
    """Wraps a relational layer so that it takes and returns features by node type.

    A call `layer(graph, x)` takes a Block, or a full graph of `RelGraph.from_relations`, and x as {node type: [nodes,
    width]}. It returns the results of the destinations in the same form.

    Args:
      layer: a module that is called as `layer(graph, x)`, such as those of `dejax.rgnn.nnx`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from dejax.minibatch.nnx import HeteroLayer
    >>> from dejax.rgnn import RelGraph
    >>> from dejax.rgnn.nnx import RGCNConv
    >>> writes = ("author", "writes", "paper")
    >>> graph = RelGraph.from_relations({writes: ([0, 1], [2, 0])}, {"author": 2, "paper": 3})
    >>> layer = HeteroLayer(RGCNConv(4, 8, 1, rngs=nnx.Rngs(0)))
    >>> found = layer(graph, {"author": jnp.ones((2, 4)), "paper": jnp.ones((3, 4))})
    >>> {name: rows.shape for name, rows in found.items()}
    {'author': (2, 8), 'paper': (3, 8)}
    """

    def __init__(self, layer: Callable[..., Array]) -> None:
        self.layer = layer

    def __call__(self, graph: Any, x: Mapping[str, Array], **keywords: Any) -> dict[str, Array]:
        """[destinations, n] by node type.

        Args:
          graph: a Block, or a full graph of `RelGraph.from_relations`.
          x: [sources, k] by node type.
          **keywords: further arguments of the layer.
        """
        ((one, rows),) = _stages.stages(graph, [self.layer])
        return _stages.split(graph, self.layer(one, _stages.join(graph, x), **keywords)[:rows])


class HeteroGNN(nnx.Module):
    """A model for heterogeneous graphs: a projection of each node type to one width, then relational layers.

    A call `model(graphs, x)` takes the blocks of `make_blocks`, one for each layer, or a full graph of
    `RelGraph.from_relations`, and the features x as {node type: [nodes, width]}. It returns the result of the last
    layer, {node type: [nodes, n]}, for the seeds of the sample or for all nodes of the graph.

    Args:
      in_features: width of the features of each node type.
      hidden_features: width of the projected features, which the first layer takes.
      layers: modules that are called as `layer(graph, x)`. The input width of each is the output width of the one
        before. For blocks, a module with the attribute `returns_destinations = True` (such as those of
        `dejax.rgnn.nnx`) is called with `Block.bipartite` and returns rows of destinations; any other module is called
        with `Block.graph`.
      activation: function that is applied between layers, not after the last one.
      dtype, param_dtype, rngs: the dtype, param dtype and random streams of the projection, as in `InputProjection`.
    """

    def __init__(
        self,
        in_features: Mapping[str, int],
        hidden_features: int,
        layers: Sequence[Any],
        *,
        activation: Callable[[Array], Array] = nnx.relu,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.project = InputProjection(in_features, hidden_features, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.num_layers = len(layers)
        for number, layer in enumerate(layers):
            setattr(self, f"layer_{number}", layer)
        self.activation = activation

    def __call__(self, graphs: Graphs, x: Mapping[str, Array]) -> dict[str, Array]:
        """The last layer's result by node type: for the seeds of a sample, or for all nodes of a full graph.

        Args:
          graphs: the blocks of `make_blocks`, one for each layer, or a full graph of `RelGraph.from_relations`.
          x: [nodes, width] by node type, in the numbers of the sample or of the graph.
        """
        layers = [getattr(self, f"layer_{number}") for number in range(self.num_layers)]
        stages = _stages.stages(graphs, layers)
        h = _stages.join(graphs, self.project(x))
        for number, (graph, rows) in enumerate(stages):
            h = layers[number](graph, self.activation(h) if number else h)[:rows]
        return _stages.split(graphs, h)
