"""The model of the command: projections by type, relational layers, and a linear map to the classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dejax._optional import optional
from dejax.minibatch import Block, InferenceBatch
from dejax.minibatch.nnx import InputProjection
from dejax.offload import offload
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.nnx import HGTConv, RGATConv, RGCNConv, SAGEConv
from dejax.training.sampled.settings import SampledSettings

with optional("flax", of="dejax.training.sampled"):
    from flax import nnx

Graphs = list[Block] | RelGraph


class SampledClassifier(nnx.Module):
    """Relational layers on the blocks of a sample, on a full graph, or on the batches of layer-by-layer inference.

    A linear map brings the features of each type to one width. Types with embeddings have that width already. A linear
    map of the last layer's result gives the outputs.

    Args:
        settings: layer, widths, heads, bases, dropout, offload.
        widths: the width of the features of each type that has some.
        edge_types, node_types: those of the topology.
        out_features: width of the result; None for the last layer's result itself.
        options: options of the compiler.
        rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(
        self,
        settings: SampledSettings,
        widths: Mapping[str, int],
        edge_types: tuple[tuple[str, str, str], ...],
        node_types: tuple[str, ...],
        out_features: int | None,
        *,
        options: Options,
        rngs: nnx.Rngs,
    ) -> None:
        self.edge_types, self.node_types = edge_types, node_types
        self.offload, self.num_layers = settings.offload, settings.layers
        self.input_dropout = settings.dropout if settings.layer == "sage" else 0.0
        self.project = InputProjection(widths, settings.hidden, rngs=rngs) if widths else nnx.data(None)
        make = _LAYERS[settings.layer]
        for number in range(settings.layers):
            setattr(self, f"layer_{number}", make(settings, len(node_types), len(edge_types), options, rngs))
        self.head = nnx.data(None)
        if out_features is not None:
            self.head = nnx.Linear(settings.hidden, out_features, rngs=rngs)

    def __call__(
        self, graphs: Graphs, x: Mapping[str, Array], *, deterministic: bool = True, rngs: nnx.Rngs | None = None
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
            h = nnx.relu(h)
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
        return offload(jax.checkpoint(call), inputs=(1,), min_bytes=_OFFLOAD_BYTES)(state, h, graph, key)

    def _out(self, h: Array) -> Array:
        return h if self.head is None else self.head(nnx.relu(h))


_OFFLOAD_BYTES = 1 << 16  # smaller arrays stay on the device


def _rgcn(s: SampledSettings, node_types: int, edge_types: int, options: Options, rngs: nnx.Rngs) -> Any:
    return RGCNConv(
        s.hidden,
        s.hidden,
        edge_types,
        num_bases=s.bases,
        edge_dropout=s.dropout,
        self_loop_dropout=s.dropout / 2,
        options=options,
        rngs=rngs,
    )


def _rgat(s: SampledSettings, node_types: int, edge_types: int, options: Options, rngs: nnx.Rngs) -> Any:
    return RGATConv(
        s.hidden,
        s.hidden // s.heads,
        edge_types,
        num_heads=s.heads,
        attention_dropout=s.dropout,
        options=options,
        rngs=rngs,
    )


def _hgt(s: SampledSettings, node_types: int, edge_types: int, options: Options, rngs: nnx.Rngs) -> Any:
    return HGTConv(
        s.hidden,
        s.hidden,
        node_types,
        edge_types,
        num_heads=s.heads,
        dropout=s.dropout,
        options=options,
        rngs=rngs,
    )


def _sage(s: SampledSettings, node_types: int, edge_types: int, options: Options, rngs: nnx.Rngs) -> Any:
    return SAGEConv(s.hidden, s.hidden, options=options, rngs=rngs)


_LAYERS: dict[str, Callable[[SampledSettings, int, int, Options, nnx.Rngs], Any]] = {
    "rgcn": _rgcn,
    "rgat": _rgat,
    "hgt": _hgt,
    "sage": _sage,
}
