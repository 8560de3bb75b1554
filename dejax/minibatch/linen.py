"""Flax linen modules for heterogeneous graphs: dicts by node type in, dicts by node type out.

    from dejax.minibatch import linen as mb
    from dejax.rgnn.linen import RGATConv

    model = mb.HeteroGNN(64, [RGATConv(16, num_heads=4), RGATConv(16, num_heads=4)])
    variables = model.init(jax.random.key(0), make_blocks(sample), x_dict)
    outputs = model.apply(variables, make_blocks(sample), x_dict)

The modules are those of `dejax.minibatch.nnx`; widths are found at the first call.
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

with optional("flax", of="dejax.minibatch.linen"):
    from flax import linen as nn

__all__ = ["HeteroGNN", "HeteroLayer", "InputProjection"]


class InputProjection(nn.Module):
    """Maps the features of each node type to one width by a linear layer of its own: y_v = x_v W_t(v) + b_t(v).

    t(v) is the type of node v. A call takes {node type: [nodes, width]} and returns {node type: [nodes, out_features]}.

    Attributes:
      out_features: width of the result.
      use_bias: whether to add b.
      dtype: dtype of the computation; None: the dtype to which x and the parameters promote.
      param_dtype: dtype of the parameters.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.minibatch.linen import InputProjection
    >>> x = {"author": jnp.ones((2, 4)), "paper": jnp.ones((3, 6))}
    >>> found, variables = InputProjection(8).init_with_output(jax.random.key(0), x)
    >>> {name: rows.shape for name, rows in found.items()}
    {'author': (2, 8), 'paper': (3, 8)}
    """

    out_features: int
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Mapping[str, Array]) -> dict[str, Array]:
        """[nodes, out_features] by node type; x is [nodes, width] by node type."""

        def linear(name: str) -> nn.Dense:
            return nn.Dense(self.out_features, self.use_bias, self.dtype, self.param_dtype, name=f"type_{name}")

        return {name: linear(name)(rows) for name, rows in x.items()}


class HeteroLayer(nn.Module):
    """Wraps a relational layer so that it takes and returns features by node type.

    A call `layer(graph, x)` takes a Block, or a full graph of `RelGraph.from_relations`, and x as {node type: [nodes,
    width]}. It returns the results of the destinations in the same form.

    Attributes:
      layer: a module that is called as `layer(graph, x)`, such as those of `dejax.rgnn.linen`.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.minibatch.linen import HeteroLayer
    >>> from dejax.rgnn import RelGraph
    >>> from dejax.rgnn.linen import RGCNConv
    >>> writes = ("author", "writes", "paper")
    >>> graph = RelGraph.from_relations({writes: ([0, 1], [2, 0])}, {"author": 2, "paper": 3})
    >>> x = {"author": jnp.ones((2, 4)), "paper": jnp.ones((3, 4))}
    >>> found, variables = HeteroLayer(RGCNConv(8)).init_with_output(jax.random.key(0), graph, x)
    >>> {name: rows.shape for name, rows in found.items()}
    {'author': (2, 8), 'paper': (3, 8)}
    """

    layer: Any

    def __call__(self, graph: Any, x: Mapping[str, Array], **keywords: Any) -> dict[str, Array]:
        """[destinations, n] by node type, of a Block or of a full graph of `RelGraph.from_relations`."""
        ((one, rows),) = _stages.stages(graph, [self.layer])
        return _stages.split(graph, self.layer(one, _stages.join(graph, x), **keywords)[:rows])


class HeteroGNN(nn.Module):
    """A model for heterogeneous graphs: a projection of each node type to one width, then relational layers.

    A call `model.apply(variables, graphs, x)` takes the blocks of `make_blocks`, one for each layer, or a full graph
    of `RelGraph.from_relations`, and the features x as {node type: [nodes, width]}. It returns the result of the last
    layer, {node type: [nodes, n]}, for the seeds of the sample or for all nodes of the graph.

    Attributes:
      hidden_features: width of the projected features, which the first layer takes.
      layers: modules that are called as `layer(graph, x)`, as in `dejax.minibatch.nnx.HeteroGNN`.
      activation: function that is applied between layers, not after the last one.
      dtype, param_dtype: dtypes of the projection, as in `InputProjection`.
    """

    hidden_features: int
    layers: Sequence[Any]
    activation: Callable[[Array], Array] = nn.relu
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, graphs: Graphs, x: Mapping[str, Array]) -> dict[str, Array]:
        """The last layer's result by node type, as in `dejax.minibatch.nnx.HeteroGNN`."""
        project = InputProjection(self.hidden_features, dtype=self.dtype, param_dtype=self.param_dtype, name="project")
        stages = _stages.stages(graphs, self.layers)
        h = _stages.join(graphs, project(x))
        for number, (graph, rows) in enumerate(stages):
            h = self.layers[number](graph, self.activation(h) if number else h)[:rows]
        return _stages.split(graphs, h)
