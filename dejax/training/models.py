"""The models of the training command: stacks of relational layers, and a baseline without edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dejax._optional import optional
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.nnx import HGTConv, RGATConv, RGCNConv
from dejax.training.settings import Settings

with optional("flax", of="dejax.training"):
    from flax import nnx


class EntityClassifier(nnx.Module):
    """Relational layers over a whole graph; the result is the class logits of every node.

    Node features enter unchanged. Without features, the input depends on the model:

    - R-GCN's first layer has one row of weights for each (source, edge type) pair that occurs. This equals a one-hot
      input to its typed weights.
    - HGT begins with that layer, too. With an embedding of each node, it fitted the training nodes only
      (examples/README.md).
    - RGAT learns an embedding of each node.

    Args:
        settings: model, widths, heads, bases, dropout.
        graph: a graph with the counts to build for.
        in_features: width of the node features; None for no features.
        num_classes: width of the result.
        options: options of the compiler.
        rngs: streams `params` and, with dropout, `dropout`.

    >>> import numpy as np
    >>> from flax import nnx
    >>> from dejax.rgnn import Options, RelGraph
    >>> from dejax.training import EntityClassifier, Settings
    >>> graph = RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> settings = Settings(dataset="mine", model="rgcn", hidden=8)
    >>> model = EntityClassifier(settings, graph, 4, 2, options=Options(), rngs=nnx.Rngs(0))
    >>> model(graph, np.ones((3, 4), np.float32)).shape
    (3, 2)
    """

    def __init__(
        self,
        settings: Settings,
        graph: RelGraph,
        in_features: int | None,
        num_classes: int,
        *,
        options: Options,
        rngs: nnx.Rngs,
    ) -> None:
        make = {"rgcn": _rgcn_layers, "rgat": _rgat_layers, "hgt": _hgt_layers}[settings.model]
        hidden = settings.hidden
        self.activation = jax.nn.elu if settings.model == "rgat" else jax.nn.relu
        embedded = in_features is None and settings.model == "rgat"
        self.embedding = nnx.data(nnx.Embed(graph.num_nodes, hidden, rngs=rngs) if embedded else None)
        # HGT's layers keep their width, so that each has a skip connection. Dense layers around them change the width.
        dense = settings.model == "hgt"
        self.project = nnx.Linear(in_features, hidden, rngs=rngs) if dense and in_features else nnx.data(None)
        self.layers = nnx.List(make(settings, graph, hidden if embedded else in_features, num_classes, options, rngs))
        self.head = nnx.Linear(hidden, num_classes, rngs=rngs) if dense else nnx.data(None)

    def __call__(
        self,
        graph: RelGraph,
        x: Array | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Class logits, [num_nodes, num_classes].

        Args:
            graph: the graph that the model was made for.
            x: node features [num_nodes, in_features]; None for a model without features.
            deterministic: True turns dropout off.
            rngs: its stream `dropout` gives dropout's key.
        """
        if self.embedding is not None:
            x = self.embedding.embedding[...]
        if self.project is not None:
            x = self.activation(self.project(x))
        for number, layer in enumerate(self.layers):
            x = layer(graph, x, deterministic=deterministic, rngs=rngs)
            if number + 1 < len(self.layers):
                x = self.activation(x)
        assert x is not None
        return x if self.head is None else self.head(x)


def _widths(settings: Settings, first: int | None, last: int) -> list[tuple[int | None, int]]:
    hidden = [settings.hidden] * (settings.layers - 1)
    return list(zip([first, *hidden], [*hidden, last], strict=True))


def _rgcn_layers(
    s: Settings, graph: RelGraph, first: int | None, last: int, options: Options, rngs: nnx.Rngs
) -> list[RGCNConv]:
    layers = []
    for width, out in _widths(s, first, last):
        featureless = width is None
        layers.append(
            RGCNConv(
                width,
                out,
                graph.num_edge_types,
                num_bases=s.bases,
                num_nodes=graph.num_nodes if featureless else None,
                num_source_pairs=graph.num_source_pairs if featureless and not s.bases else None,
                edge_dropout=s.dropout,
                self_loop_dropout=s.dropout / 2,
                options=options,
                rngs=rngs,
            )
        )
    return layers


def _rgat_layers(
    s: Settings, graph: RelGraph, first: int | None, last: int, options: Options, rngs: nnx.Rngs
) -> list[RGATConv]:
    layers = []
    for number, (width, out) in enumerate(_widths(s, first, last)):
        final = number + 1 == s.layers  # averages its heads, as GAT does
        layers.append(
            RGATConv(
                width or 0,
                out if final else out // s.heads,
                graph.num_edge_types,
                num_heads=s.heads,
                concat_heads=not final,
                attention_dropout=s.dropout,
                options=options,
                rngs=rngs,
            )
        )
    return layers


def _hgt_layers(
    s: Settings, graph: RelGraph, first: int | None, last: int, options: Options, rngs: nnx.Rngs
) -> list[RGCNConv | HGTConv]:
    layers: list[RGCNConv | HGTConv] = []
    if first is None:
        if s.layers < 2:
            raise ValueError(
                f"layers must be at least 2 for HGT without features, the first is typed input; got {s.layers}"
            )
        layers.append(RGCNConv.featureless(graph, s.hidden, options=options, rngs=rngs))
    while len(layers) < s.layers:
        layers.append(
            HGTConv(
                s.hidden,
                s.hidden,
                graph.num_node_types,
                graph.num_edge_types,
                num_heads=s.heads,
                dropout=s.dropout,
                options=options,
                rngs=rngs,
            )
        )
    return layers


class NodeMLP(nnx.Module):
    """The baseline without edges: dense layers on a node's features (if it has any) and its one-hot type.

    Args:
        settings: widths.
        graph: a graph with the node types to build for.
        in_features: width of the node features; None for no features.
        num_classes: width of the result.
        rngs: stream `params`.

    >>> import numpy as np
    >>> from flax import nnx
    >>> from dejax.rgnn import RelGraph
    >>> from dejax.training import NodeMLP, Settings
    >>> graph = RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> model = NodeMLP(Settings(dataset="mine", model="mlp"), graph, 4, 2, rngs=nnx.Rngs(0))
    >>> model(graph, np.ones((3, 4), np.float32)).shape
    (3, 2)
    """

    def __init__(
        self, settings: Settings, graph: RelGraph, in_features: int | None, num_classes: int, *, rngs: nnx.Rngs
    ) -> None:
        widths = _widths(settings, (in_features or 0) + graph.num_node_types, num_classes)
        self.layers = nnx.List([nnx.Linear(width, out, rngs=rngs) for width, out in widths])

    def __call__(
        self,
        graph: RelGraph,
        x: Array | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Class logits, [num_nodes, num_classes]; of the graph only the node types are read."""
        types = jax.nn.one_hot(graph.node_type, graph.num_node_types)
        x = types if x is None else jnp.concatenate([x, types], axis=-1)
        for number, layer in enumerate(self.layers):
            x = layer(jax.nn.relu(x) if number else x)
        return x
