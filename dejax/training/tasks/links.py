"""The task "links": an encoder of relational layers, a decoder, wrong ends of edges, and filtered ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax.datasets import HeteroDataset
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    LinkRanks,
    SampledBlocks,
    binary_cross_entropy,
    find_capacities,
    link_ranks,
    make_typed_blocks,
    sample_blocks,
    softmax_cross_entropy,
)
from dejax.rgnn import Options, RelGraph
from dejax.segment import gather
from dejax.training.settings import Settings
from dejax.training.state import TrainState
from dejax.training.tasks.data import NODE
from dejax.training.tasks.link_graph import EDGE, LinkGraph
from dejax.training.tasks.models import LinkModel, decoder_of
from dejax.training.tasks.task import (
    CAPACITY_BATCHES,
    SAMPLE_OPTIONS,
    Runner,
    StepView,
    TrainingTask,
    World,
    digest_of,
    spread_over_steps,
)

with optional("flax", of="dejax.training"):
    from flax import nnx

SHARING = 64
"""This many consecutive edges of a batch share their negatives, because all negatives are seeds of the sample."""


class Negatives:
    """Wrong ends of edges: nodes of the right type.

    `draw` draws them on the host for the steps of an epoch. `places` says inside a step which of the drawn nodes are
    the negatives of each edge.

    Args:
        graph: the graph.
        settings: number and kind of the negatives.

    Attributes:
        types: the node types at the ends of training edges.
    """

    def __init__(self, graph: LinkGraph, settings: Settings) -> None:
        self.settings, self.first = settings, graph.first
        # A node occurs as often as it has edges. Nodes are numbered type after type, so the ends of a type are a range.
        self._ends = np.sort(graph.train[:, [0, 2]].reshape(-1))
        self._bounds = np.searchsorted(self._ends, graph.first)
        self.types = np.flatnonzero(np.diff(self._bounds)).astype(np.int32)

    def draw(self, rng: np.random.Generator, steps: int, batch: int) -> np.ndarray:
        """int32[steps, n]: for each type of `types`, each `SHARING` edges and each negative a node of the type."""
        kind = self.settings.negative_kind
        if kind in ("in_batch", "all"):
            return np.zeros((steps, 0), np.int32)
        chunks, k = -(-batch // SHARING), self.settings.negatives
        bounds = self.first if kind == "uniform" else self._bounds
        shape = (steps, chunks, k)
        drawn = np.stack([rng.integers(bounds[t], bounds[t + 1], shape) for t in self.types], axis=1)
        return (drawn if kind == "uniform" else self._ends[drawn]).reshape(steps, -1).astype(np.int32)

    def places(self, key: Array, true: Array, kind: Array, wrong: Array) -> tuple[Array, Array]:
        """The negatives of each edge, as places in `concatenate([true, wrong])`.

        Args:
            key: a random key.
            true: int32[batch], the true ends; -1 for padding.
            kind: int32[batch], their types.
            wrong: int32[n], a step's nodes of `draw`.

        Returns:
            int32[batch, k]; and bool[batch, k], which of them count: not the true end itself, and of its type.
        """
        count, k = true.shape[0], self.settings.negatives
        there = (true >= 0)[:, None]
        if self.settings.negative_kind == "in_batch":
            others = jax.random.randint(key, (count, k), 1, max(count, 2))
            places = (jnp.arange(count)[:, None] + others) % count
            found = true[places]
            return places, there & (found >= 0) & (found != true[:, None]) & (kind[places] == kind[:, None])
        chunks = -(-count // SHARING)
        sets = jnp.searchsorted(jnp.asarray(self.types), kind) * chunks + jnp.arange(count) // SHARING
        places = sets[:, None] * k + jnp.arange(k)
        return count + places, there & (wrong[places] != true[:, None])


class LinkTask(TrainingTask):
    """Prediction of edges.

    Args:
        settings: encoder, decoder and hyperparameters.
        data: the data set, or its `LinkGraph`.
        options: options of the compiler.
        print_table: takes the table of capacities as text; None for no table.

    Raises:
        ValueError: the data set has no edges to predict, or fields that would be ignored.
    """

    classes = False
    measure = "filtered MRR"

    def __init__(
        self,
        settings: Settings,
        data: HeteroDataset | LinkGraph,
        options: Options,
        print_table: Callable[[str], None] | None = None,
    ) -> None:
        self.settings, self.options = settings, options
        # Without layers no neighbours are read.
        self.sampled = bool(settings.layers) and not settings.full_batch
        self.graph = graph = data if isinstance(data, LinkGraph) else LinkGraph.of(data)
        self.decoder, self.negatives = decoder_of(settings), Negatives(graph, settings)
        self.seeds_per_epoch = len(graph.train)
        self.batch_size = min(settings.batch_size, len(graph.train))
        self.steps_per_epoch = -(-len(graph.train) // self.batch_size)
        self.embedded = {NODE: graph.num_nodes} if graph.features is None else {}
        own = graph.data.node_names if self.embedded else {}
        self.layout_of_data = digest_of([list(graph.data.edges), list(graph.data.num_nodes), own])
        features = FeatureStore()
        if graph.features is not None:
            features = FeatureStore.from_arrays({NODE: graph.features})
        arrays = {"edge_type": jnp.asarray(graph.edge_type), "node_type": jnp.asarray(graph.node_type)}
        if settings.layers and settings.full_batch:
            arrays |= {"senders": jnp.asarray(graph.senders), "receivers": jnp.asarray(graph.receivers)}
        self.world = World(graph.topology, features, arrays)
        self.capacities = None
        if self.sampled:
            self.capacities = find_capacities(
                jax.random.key(0),
                graph.topology,
                self._capacity_batches(),
                list(settings.fan_outs),
                print_table=print_table,
                options=SAMPLE_OPTIONS,
            )
        self._encode = jax.jit(self._encoded, static_argnums=0)
        self._whole: RelGraph | None = None

    def _capacity_batches(self) -> list[Any]:
        batches: list[Any] = []
        epoch = 0
        while len(batches) < CAPACITY_BATCHES:
            order, epoch = self.order(0, epoch), epoch + 1
            batches += [
                (NODE, seeds_of({name: some[n] for name, some in order.items()})) for n in range(len(order["true"]))
            ]
        return batches[:CAPACITY_BATCHES]

    def model(self, key: Array) -> LinkModel:
        """The encoder, and the decoder's vectors of relations."""
        graph = self.graph
        width = None if graph.features is None else graph.features.shape[1]
        counts = graph.num_relations, len(graph.data.num_nodes)
        return LinkModel(self.settings, *counts, width, options=self.options, rngs=nnx.Rngs(key))

    # -------------------------------------------------------------------------------------------- a step

    def order(self, seed: int, epoch: int) -> Any:
        """The training edges of an epoch in random order, and their negatives.

        Every other edge keeps its receiver and gets wrong senders. "kept" and "true" are the two ends, -1 for padding;
        "relation" is the edge's relation, "edge" its place in the lists, "kind" the type of the true end, and "wrong"
        the nodes that negatives are chosen from.
        """
        rng, graph = np.random.default_rng([seed, epoch]), self.graph
        rows = rng.permutation(len(graph.train)).astype(np.int32)
        rows = spread_over_steps(rows, self.steps_per_epoch, self.batch_size)
        head, relation, tail = graph.train[np.maximum(rows, 0)].transpose(2, 0, 1)
        flipped = _flipped(self.batch_size)
        kept, true = np.where(flipped, tail, head), np.where(flipped, head, tail)
        there = rows >= 0
        return {
            "kept": np.where(there, kept, -1),
            "true": np.where(there, true, -1),
            "relation": relation,
            "edge": np.where(there, graph.train_edge[np.maximum(rows, 0)], len(graph.edge_type)).astype(np.int32),
            "kind": graph.node_type[true],
            "wrong": self.negatives.draw(rng, self.steps_per_epoch, self.batch_size),
        }

    def sample(self, key: Array, topology: HeteroTopology, seeds: Any) -> SampledBlocks:
        """The neighbourhood of all ends, without the edges to predict and their reverses."""
        pairs = (seeds["kept"], seeds["true"])
        both = (jnp.concatenate(pairs), jnp.concatenate(pairs[::-1]))
        return sample_blocks(
            key,
            topology,
            (NODE, seeds_of(seeds)),
            list(self.settings.fan_outs),
            capacities=self.capacities,
            exclude={EDGE: both},
            options=SAMPLE_OPTIONS,
        )

    def view(self, topology: HeteroTopology | None, data: Any, seeds: Any, sample: SampledBlocks | None) -> StepView:
        """The graph of each layer and how many of its rows are kept. None has an edge to predict or its reverse."""
        relations = 2 * self.graph.num_relations
        if sample is not None:
            assert topology is not None
            blocks = make_typed_blocks(topology, sample, data["edge_type"], relations)
            graphs: list[Any] = [(block.graph, block.num_destinations) for block in blocks]
            return StepView(graphs, sample.node_ids, sample.seed_positions, sample.lost.sum(dtype=jnp.int32))
        edges, count = data["edge_type"].shape[0], self.graph.num_nodes
        ids = {NODE: jnp.arange(count, dtype=jnp.int32)}
        positions, lost = {NODE: seeds_of(seeds)}, jnp.zeros((), jnp.int32)
        if not self.settings.layers:
            return StepView([], ids, positions, lost)
        # Places beyond the lists, those of padding, are dropped; half of the lists are reverses.
        gone = jnp.where((seeds["kept"] >= 0), seeds["edge"], edges)
        kept = jnp.ones(edges, bool).at[jnp.concatenate([gone, gone + edges // 2])].set(False, mode="drop")
        graph = RelGraph.build_traced(
            data["senders"],
            data["receivers"],
            data["edge_type"],
            num_nodes=count,
            num_edge_types=relations,
            edge_mask=kept,
        )
        return StepView([(graph, None)] * self.settings.layers, ids, positions, lost)

    def loss(
        self, model: Any, view: StepView, x: dict[str, Array], seeds: Any, data: Any, key: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """The loss of each edge against its negatives.

        Rows are read by `gather`, whose gradient adds in a fixed order: many edges have one node, and on a GPU the
        gradient of `x[ids]` would have other bits in each run.
        """
        place_key, dropout_key = jax.random.split(key)
        node_type = data["node_type"][jnp.maximum(view.ids[NODE], 0)]
        every = model.encode(view.graphs, model.inputs(x[NODE], node_type), rngs=nnx.Rngs(dropout=dropout_key))
        h = gather(every, jnp.maximum(view.positions[NODE], 0))
        count, decoder = self.batch_size, self.decoder
        own, right, others = h[:count], h[count : 2 * count], h[count:]
        r, flipped = model.relation(jnp.maximum(seeds["relation"], 0)), jnp.asarray(_flipped(count))
        query = jnp.where(flipped[:, None], decoder.query_head(own, r), decoder.query_tail(own, r))
        positive = decoder.similarity(query, right)
        kind, mask = jnp.maximum(seeds["kind"], 0), seeds["kept"] >= 0
        if self.settings.negative_kind == "all":
            negative = decoder.score_all(query, every)
            other = jnp.arange(every.shape[0]) != seeds["true"][:, None]
            there = mask[:, None] & other & (node_type == kind[:, None])
        else:
            places, there = self.negatives.places(place_key, seeds["true"], kind, seeds["wrong"])
            negative = decoder.similarity(query[:, None], gather(others, places.reshape(-1)).reshape(*places.shape, -1))
        of_batch = softmax_cross_entropy if self.settings.loss == "softmax" else binary_cross_entropy
        loss = of_batch(positive, negative, mask=mask, negative_mask=there)
        if self.settings.n3:
            loss += self.settings.n3 * self._cubes(mask, own, right, None if decoder.distance else r)  # not of angles
        return loss, (mask.sum(dtype=jnp.int32), {})

    def _cubes(self, mask: Array, *ends: Array | None) -> Array:
        """The mean over edges of the sum of |x|^3, the nuclear 3-norm (Lacroix et al., arXiv 1806.07297)."""
        hidden, total = self.settings.hidden, jnp.zeros((), jnp.float32)
        for x in ends:
            if x is None:
                continue
            square = jnp.square(x.reshape(x.shape[0], -1, hidden))
            if self.decoder.pairs:
                square = square[..., : hidden // 2] + square[..., hidden // 2 :]
            total += jnp.where(mask[:, None, None], square * jnp.sqrt(jnp.maximum(square, 1e-30)), 0).sum()
        return total / jnp.maximum(mask.sum(), 1)

    # -------------------------------------------------------------------------------------------- ranks

    def measures(self, trainer: Runner, state: TrainState, *, last: bool) -> dict[str, float]:
        """The filtered MRR of validation edges as "valid"; nan where it is not due."""
        epoch = int(state.step) // self.steps_per_epoch
        due = (last or epoch % self.settings.eval_every == 0) and len(self.graph.splits["valid"])
        if not due:
            return {"valid": float("nan")}
        return {"valid": self.ranks(trainer, state, "valid", self.settings.eval_edges, progress=False).mrr}

    def final(self, trainer: Runner, state: TrainState, *, inference: str | None = None) -> dict[str, float]:
        """Filtered MRR and Hits@1, 3, 10 of the test edges."""
        ranks = self.ranks(trainer, state, "test")
        return {"mrr": ranks.mrr, **{f"hits@{k}": ranks.hits(k) for k in (1, 3, 10)}}

    def _encoded(self, trainer: Runner, params: Any, x: Array, graph: RelGraph, node_type: Array) -> Array:
        model = trainer.merged(params)
        found: Array = model.encode([(graph, None)] * self.settings.layers, model.inputs(x, node_type))
        return found

    def encode(self, trainer: Runner, state: TrainState) -> Array:
        """[nodes, hidden], from the whole graph of training edges, on the device."""
        own = self.graph
        if self._whole is None and self.settings.layers:
            edges, relations = (own.senders, own.receivers, own.edge_type), 2 * own.num_relations
            self._whole = RelGraph.from_edges(*edges, num_nodes=own.num_nodes, num_edge_types=relations)
        x = state.embeddings[NODE].table.numpy() if own.features is None else own.features
        data = jnp.asarray(x, jnp.float32), self._whole, self.world.data["node_type"]
        found: Array = self._encode(trainer, state.params, *data)
        return found

    def ranks(
        self, trainer: Runner, state: TrainState, split: str, most: int = 0, *, progress: bool | None = None
    ) -> LinkRanks:
        """Filtered ranks of the triples of a split, among the nodes of the right types.

        Args:
            trainer: the trainer, which has the model.
            state: the state.
            split: valid or test.
            most: how many triples, in random order; 0: all.
            progress: draw a bar; None draws on a terminal only.
        """
        graph, triples = self.graph, self.graph.splits[split]
        if most and len(triples) > most:
            triples = triples[np.random.default_rng(0).permutation(len(triples))[:most]]
        known = np.concatenate([graph.train, *graph.splits.values()])
        nodes = self.encode(trainer, state)
        vectors = None if not self.decoder.relation_width(self.settings.hidden) else state.params["relations"][...]
        found: list[LinkRanks] = []
        ends = np.stack([graph.node_type[triples[:, 0]], graph.node_type[triples[:, 2]]], axis=1)
        of_known = np.stack([graph.node_type[known[:, 0]], graph.node_type[known[:, 2]]], axis=1)
        for source, target in np.unique(ends, axis=0):
            first, last = graph.first[[source, target]], graph.first[[source + 1, target + 1]]
            own = triples[(ends == [source, target]).all(1)] - [first[0], 0, first[1]]
            true = known[(of_known == [source, target]).all(1)] - [first[0], 0, first[1]]
            if vectors is None:  # of dot: all relations are one
                own, true = (np.stack([rows[:, 0], 0 * rows[:, 1], rows[:, 2]], axis=1) for rows in (own, true))
            heads, tails = nodes[first[0] : last[0]], nodes[first[1] : last[1]]
            found.append(link_ranks(self.decoder, heads, vectors, tails, own, known=true, progress=progress))
        if not found:
            return LinkRanks(np.zeros(0), np.zeros(0))
        return LinkRanks(*(np.concatenate([getattr(r, side) for r in found]) for side in ("tail", "head")))

    def vectors(self, trainer: Runner, state: TrainState) -> dict[str, np.ndarray]:
        """What the decoder reads, for use elsewhere.

        Returns:
            "entities": float32[nodes, hidden], the encoded nodes, type after type; "entity_names": str[nodes], their
            names, or type and number; "relations": float32[relations, width] and "relation_names", unless the decoder
            has no relations.
        """
        data = self.graph.data
        names = [
            name
            for kind, count in data.num_nodes.items()
            for name in data.node_names.get(kind, ()) or [f"{kind} {number}" for number in range(count)]
        ]
        found = {"entities": np.asarray(self.encode(trainer, state)), "entity_names": np.array(names)}
        if self.decoder.relation_width(self.settings.hidden):
            found["relations"] = np.asarray(state.params["relations"][...])
            found["relation_names"] = np.array([name for _, name, _ in data.edges])
        return found

    def counts(self) -> dict[str, Any]:
        """The sizes of the graph, for the report."""
        graph = self.graph
        sizes = {"train": len(graph.train), **{name: len(rows) for name, rows in graph.splits.items()}}
        return {
            "nodes": graph.num_nodes,
            "edges": len(graph.senders) // 2,
            "edge_types": graph.num_relations,
            "node_types": len(graph.data.num_nodes),
            "features": 0 if graph.features is None else int(graph.features.shape[1]),
            "split_sizes": sizes,
        }


def seeds_of(seeds: Any) -> Any:
    """All nodes of a step whose neighbourhoods are sampled: both ends, then the nodes of negatives."""
    xp = np if isinstance(seeds["kept"], np.ndarray) else jnp
    return xp.concatenate([seeds["kept"], seeds["true"], seeds["wrong"]])


def _flipped(batch: int) -> np.ndarray:
    """Which edges of a batch keep their receiver."""
    return np.arange(batch) % 2 == 1
