"""The models: stacks of relational layers on whole graphs and on blocks, an encoder of links, and a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dejax._optional import optional
from dejax.minibatch import DECODERS, Block, Decoder, InferenceBatch, reciprocal, rotate_decoder
from dejax.minibatch.nnx import InputProjection
from dejax.offload import offload
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.nnx import HGTConv, RGATConv, RGCNConv, SAGEConv
from dejax.segment import gather
from dejax.training.settings import Settings

with optional("flax", of="dejax.training"):
    from flax import nnx


def relational_layer(
    s: Settings,
    width: int | None,
    out: int,
    counts: tuple[int, int],
    options: Options,
    rngs: nnx.Rngs,
    *,
    dropout: float | None = None,
    **more: Any,
) -> Any:
    """A layer of `s.model`.

    Args:
        s: model, heads, bases, dropout.
        width: the width of the input; None for no input (rgcn alone).
        out: width of the result, all heads together.
        counts: node types and edge types.
        options: options of the compiler.
        rngs: streams `params` and, with dropout, `dropout`.
        dropout: instead of `s.dropout`.
        more: further arguments of the layer's class.
    """
    node_types, edge_types = counts
    share = s.dropout if dropout is None else dropout
    if s.model == "rgcn":
        return RGCNConv(
            width,
            out,
            edge_types,
            num_bases=s.bases,
            edge_dropout=share,
            self_loop_dropout=share / 2,
            options=options,
            rngs=rngs,
            **more,
        )
    if s.model == "rgat":
        each = out // s.heads if more.get("concat_heads", True) else out
        attention = {"num_heads": s.heads, "attention_dropout": share, **more}
        return RGATConv(width or 0, each, edge_types, **attention, options=options, rngs=rngs)
    assert width is not None
    if s.model == "hgt":
        return HGTConv(
            width, out, node_types, edge_types, num_heads=s.heads, dropout=share, options=options, rngs=rngs, **more
        )
    return SAGEConv(width, out, options=options, rngs=rngs, **more)


class EntityClassifier(nnx.Module):
    """A stack of relational layers over a whole graph that computes class logits for every node, as an nnx module.

    Node features enter unchanged. For nodes without features, the first layer depends on the model:

    - R-GCN has a row of weights for each (source, edge type) pair that occurs, which equals one-hot features.
    - HGT begins with this R-GCN layer, because with an embedding of each node it fitted only the training nodes
      (examples/README.md).
    - RGAT learns an embedding of each node.

    Args:
        settings: model, widths, heads, bases, dropout.
        graph: a graph with the numbers of nodes and types of the data.
        in_features: width of the node features; None without features.
        num_classes: number of classes, the width of the result.
        options: options of the compiler.
        rngs: random streams: `params` and, with dropout, `dropout`.

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
        hidden = settings.hidden
        self.activation = jax.nn.elu if settings.model == "rgat" else jax.nn.relu
        embedded = in_features is None and settings.model == "rgat"
        self.embedding = nnx.data(nnx.Embed(graph.num_nodes, hidden, rngs=rngs) if embedded else None)
        # HGT's layers keep their width, so that each has a skip connection. Dense layers around them change the width.
        dense = settings.model == "hgt"
        self.project = nnx.Linear(in_features, hidden, rngs=rngs) if dense and in_features else nnx.data(None)
        self.layers = nnx.List(
            _entity_layers(settings, graph, hidden if embedded else in_features, num_classes, options, rngs)
        )
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


def _entity_layers(
    s: Settings, graph: RelGraph, first: int | None, last: int, options: Options, rngs: nnx.Rngs
) -> list[Any]:
    counts = graph.num_node_types, graph.num_edge_types
    layers: list[Any] = []
    if s.model == "hgt":
        if first is None and s.layers < 2:
            raise ValueError(
                "layers must be at least 2 for HGT without node features, whose first layer is an R-GCN layer, got "
                f"{s.layers}"
            )
        if first is None:
            layers.append(RGCNConv.featureless(graph, s.hidden, options=options, rngs=rngs))
        return layers + [
            relational_layer(s, s.hidden, s.hidden, counts, options, rngs) for _ in range(s.layers - len(layers))
        ]
    for number, (width, out) in enumerate(_widths(s, first, last)):
        more: dict[str, Any] = {}
        if s.model == "rgat":  # the last layer averages its heads, as GAT does
            more["concat_heads"] = number + 1 < s.layers
        elif width is None:
            more = {"num_nodes": graph.num_nodes, "num_source_pairs": None if s.bases else graph.num_source_pairs}
        layers.append(relational_layer(s, width, out, counts, options, rngs, **more))
    return layers


class NodeMLP(nnx.Module):
    """A baseline that ignores edges: dense layers on the features of each node (if there are any) and its one-hot type.

    Args:
        settings: widths.
        graph: a graph with the node types of the data.
        in_features: width of the node features; None without features.
        num_classes: number of classes, the width of the result.
        rngs: random stream `params`.

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


OFFLOAD_BYTES = 1 << 16
"""Smaller residuals stay on the device."""


class SampledClassifier(nnx.Module):
    """Relational layers on the blocks of a sample, on a full graph, or on the batches of layer-by-layer inference.

    A linear map brings the features of each type to one width. Types with embeddings have that width already. A linear
    map of the last layer's result gives the outputs.

    Args:
        settings: layer, widths, heads, bases, dropout, offload.
        widths: the width of the features of each type that has some.
        edge_types, node_types: those of the topology.
        out_features: width of the result; None for the last layer's result itself.
        normalized: whether a layer norm follows each layer.
        options: options of the compiler.
        rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(
        self,
        settings: Settings,
        widths: Mapping[str, int],
        edge_types: tuple[tuple[str, str, str], ...],
        node_types: tuple[str, ...],
        out_features: int | None,
        *,
        normalized: bool = False,
        options: Options,
        rngs: nnx.Rngs,
    ) -> None:
        self.edge_types, self.node_types = edge_types, node_types
        self.offload, self.num_layers = settings.offload, settings.layers
        self.input_dropout = settings.dropout if settings.model == "sage" else 0.0
        self.project = InputProjection(widths, settings.hidden, rngs=rngs) if widths else nnx.data(None)
        counts = len(node_types), len(edge_types)
        for number in range(settings.layers):
            layer = relational_layer(settings, settings.hidden, settings.hidden, counts, options, rngs)
            setattr(self, f"layer_{number}", layer)
        norms = settings.layers if normalized else 0
        self.norms = nnx.List([nnx.LayerNorm(settings.hidden, rngs=rngs) for _ in range(norms)])
        self.head = nnx.data(None)
        if out_features is not None:
            self.head = nnx.Linear(settings.hidden, out_features, rngs=rngs)

    def __call__(
        self,
        graphs: list[Block] | RelGraph,
        x: Mapping[str, Array],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> dict[str, Array]:
        """The outputs of the seeds of a sample, or of all nodes of a full graph, by node type.

        Args:
            graphs: the blocks of `make_blocks`, or a full graph of `RelGraph.from_relations`.
            x: [nodes, width] by node type, features or embeddings.
            deterministic: True turns dropout off.
            rngs: its stream `dropout` gives dropout's key.
        """
        x = self._projected(x)
        if isinstance(graphs, RelGraph):
            h = jnp.concatenate([x[name] for name in self.node_types if x[name].shape[0]])
        else:
            h = graphs[0].join(x)
        for number in range(self.num_layers):
            graph = graphs if isinstance(graphs, RelGraph) else graphs[number].bipartite
            h = self._layer(number, graph, h, deterministic, rngs)
        h = self._out(h)
        if isinstance(graphs, RelGraph):
            return {name: h[graphs.node_slice(name)] for name in self.node_types}
        return graphs[-1].split(h)

    def on_batch(self, number: int, batch: InferenceBatch) -> Array:
        """The result of one layer for the nodes of a batch of `infer_layers`, without dropout."""
        own, sources = batch.own, batch.sources
        assert own is not None
        if number == 0:
            own = self._projected({batch.node_type: own})[batch.node_type]
            sources = self._projected(sources)
        graph, h = batch.graph(own, sources, edge_types=self.edge_types, node_types=self.node_types)
        h = self._layer(number, graph, h, True, None)[: own.shape[0]]
        return self._out(h) if number + 1 == self.num_layers else h

    def _projected(self, x: Mapping[str, Array]) -> dict[str, Array]:
        if self.project is None:
            return dict(x)
        known = dict(self.project.in_features)
        featured = self.project({name: rows for name, rows in x.items() if name in known})
        return {name: featured.get(name, rows) for name, rows in x.items()}

    def _layer(self, number: int, graph: RelGraph, h: Array, deterministic: bool, rngs: nnx.Rngs | None) -> Array:
        if number:
            h = self._activated(number - 1, h)
        if self.input_dropout and not deterministic:
            assert rngs is not None
            h = nnx.Dropout(self.input_dropout, deterministic=False)(h, rngs=rngs)
        layer = getattr(self, f"layer_{number}")
        if deterministic:
            return layer(graph, h, deterministic=True)
        graphdef, state = nnx.split(layer)
        key = None if rngs is None else rngs.dropout()

        def call(state: Any, h: Array, graph: RelGraph, key: Array | None) -> Array:
            own = None if key is None else nnx.Rngs(dropout=key)
            return nnx.merge(graphdef, state)(graph, h, deterministic=own is None, rngs=own)

        # The same keys of dropout, and so the same numbers, with offload and without.
        if not self.offload:
            return call(state, h, graph, key)
        # Backward computes the layer again: of its residuals only the input is stored.
        return offload(jax.checkpoint(call), inputs=(1,), min_bytes=OFFLOAD_BYTES)(state, h, graph, key)

    def _out(self, h: Array) -> Array:
        return h if self.head is None else self.head(self._activated(self.num_layers - 1, h))

    def _activated(self, number: int, h: Array) -> Array:
        """The result of layer `number`, normalised if the model does so, after ReLU."""
        return nnx.relu(self.norms[number](h) if self.norms else h)


def decoder_of(settings: Settings) -> Decoder:
    """The decoder of the settings."""
    decoder = rotate_decoder(settings.margin) if settings.decoder == "rotate" else DECODERS[settings.decoder]
    return reciprocal(decoder) if settings.reciprocal else decoder


class LinkModel(nnx.Module):
    """Relational layers that encode nodes, and a vector for each relation.

    Args:
        settings: layer, widths, decoder.
        num_relations: relations without reverses; the layers have twice as many.
        num_node_types: a learned vector of its type is added to each node's features.
        in_features: width of the features; None for embeddings of width `settings.hidden`.
        options: options of the compiler.
        rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(
        self,
        settings: Settings,
        num_relations: int,
        num_node_types: int,
        in_features: int | None,
        *,
        options: Options,
        rngs: nnx.Rngs,
    ) -> None:
        hidden, kinds = settings.hidden, 2 * num_relations
        self.num_layers, self.dropout = settings.layers, settings.dropout
        self.project: Any = nnx.data(None)
        self.types: Any = nnx.data(None)
        if in_features is not None:
            self.project = nnx.Linear(in_features, hidden, rngs=rngs)
            self.types = nnx.Embed(num_node_types, hidden, rngs=rngs)
        for number in range(settings.layers):
            layer = relational_layer(settings, hidden, hidden, (num_node_types, kinds), options, rngs, dropout=0.0)
            setattr(self, f"layer_{number}", layer)
        width = decoder_of(settings).relation_width(hidden)
        self.relations: Any = nnx.data(None)
        if width:
            scale = 3.14159 if settings.decoder == "rotate" else hidden**-0.5
            values = scale * jax.random.uniform(rngs.params(), (num_relations, width), minval=-1.0, maxval=1.0)
            self.relations = nnx.Param(values)

    def inputs(self, x: Array, node_type: Array) -> Array:
        """The values that the first layer reads, from features or embeddings."""
        return x if self.project is None else self.project(x) + gather(self.types.embedding[...], node_type)

    def encode(self, graphs: Sequence[tuple[RelGraph, int | None]], x: Array, *, rngs: nnx.Rngs | None = None) -> Array:
        """[seeds, hidden] from the graph of each layer and how many of its rows are kept (None: all).

        Args:
            graphs: one for each layer.
            x: result of `inputs` for the nodes of the first graph.
            rngs: with a stream `dropout`; None: no dropout.
        """
        h = x
        for number, (graph, rows) in enumerate(graphs):
            h = getattr(self, f"layer_{number}")(graph, nnx.relu(h) if number else h)[:rows] + h[:rows]
        if rngs is not None and self.dropout:
            h = nnx.Dropout(self.dropout, deterministic=False)(h, rngs=rngs)
        return h

    def relation(self, numbers: Array) -> Array | None:
        """The vectors of relations, for the decoder."""
        return None if self.relations is None else gather(self.relations[...], numbers)
