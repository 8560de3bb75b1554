"""The model of link prediction: an encoder of relational layers, and a decoder's vectors of relations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from dejax._optional import optional
from dejax.minibatch import DECODERS, Decoder, rotate_decoder
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.nnx import RGATConv, RGCNConv, SAGEConv
from dejax.training.links.settings import LinkSettings

with optional("flax", of="dejax.training.links"):
    from flax import nnx


def decoder_of(settings: LinkSettings) -> Decoder:
    """The decoder of the settings."""
    return rotate_decoder(settings.margin) if settings.decoder == "rotate" else DECODERS[settings.decoder]


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
        settings: LinkSettings,
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
            setattr(self, f"layer_{number}", _layer(settings, kinds, options, rngs))
        width = decoder_of(settings).relation_width(hidden)
        self.relations: Any = nnx.data(None)
        if width:
            scale = 3.14159 if settings.decoder == "rotate" else hidden**-0.5
            values = scale * jax.random.uniform(rngs.params(), (num_relations, width), minval=-1.0, maxval=1.0)
            self.relations = nnx.Param(values)

    def inputs(self, x: Array, node_type: Array) -> Array:
        """The values that the first layer reads, from features or embeddings."""
        return x if self.project is None else self.project(x) + self.types(node_type)

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
        return None if self.relations is None else self.relations[...][numbers]


def _layer(s: LinkSettings, edge_types: int, options: Options, rngs: nnx.Rngs) -> Any:
    if s.layer == "rgcn":
        return RGCNConv(s.hidden, s.hidden, edge_types, num_bases=s.bases, options=options, rngs=rngs)
    if s.layer == "rgat":
        return RGATConv(s.hidden, s.hidden // s.heads, edge_types, num_heads=s.heads, options=options, rngs=rngs)
    return SAGEConv(s.hidden, s.hidden, options=options, rngs=rngs)
