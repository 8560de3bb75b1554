"""Training of link prediction: one jitted step samples, encodes, scores and updates; filtered ranks at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax._pytrees import pytree
from dejax.host_gather import adam
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    LinkRanks,
    binary_cross_entropy,
    link_ranks,
    make_typed_blocks,
    sample_blocks,
    softmax_cross_entropy,
)
from dejax.rgnn import Options, RelGraph
from dejax.training.links.data import EDGE, NODE, LinkGraph
from dejax.training.links.model import LinkModel, decoder_of
from dejax.training.links.negatives import Pool, draw, pool_of
from dejax.training.links.settings import LinkSettings
from dejax.training.mini_batch import CAPACITY_BATCHES, BatchTrainer

with optional("optax", of="dejax.training.links"):
    import optax
with optional("flax", of="dejax.training.links"):
    from flax import nnx

Graphs = list[tuple[RelGraph, int | None]]


@pytree
@dataclass(frozen=True, slots=True)
class LinkState:
    """The state that changes from step to step. A run resumes from it.

    Attributes:
        params: the model's parameters, an nnx.State.
        opt_state: the state of Adam.
        embeddings: the table of node embeddings in host memory; empty if nodes have features.
        moments: Adam's state of the embeddings.
        step: int32 scalar, number of finished steps.
        key: uint32 [2], the run's random key as plain integers.
        loss: float32 scalar, the sum over the steps of the epoch.
        lost: int32 scalar, sampled nodes that did not fit, in all steps.
    """

    params: Any
    opt_state: Any
    embeddings: FeatureStore
    moments: Any
    step: Array
    key: Array
    loss: Array
    lost: Array


@pytree
@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a step that do not change; arguments of the jitted functions."""

    topology: HeteroTopology
    features: FeatureStore
    edge_type: Array
    senders: Array | None  # of all edges, where a step sees the whole graph
    receivers: Array | None
    node_type: Array
    triples: Array
    triple_edge: Array
    pool: Pool


class LinkTrainer(BatchTrainer):
    """Training of one encoder and decoder on one data set.

    Args:
        settings: encoder, decoder and hyperparameters.
        graph: the data.
        backend: backend of the compiler: "auto", "pallas" or "xla".
        print_table: takes the table of capacities as text; None for no table.

    Attributes:
        steps_per_epoch: steps of a pass over the training triples.
        num_params: number of parameters of the model, without embeddings.
        compile_seconds: time spent in compilation of the step.
    """

    def __init__(
        self, settings: LinkSettings, graph: LinkGraph, *, backend: str = "auto", print_table: Any = None
    ) -> None:
        super().__init__(settings)
        self.graph = graph
        self.decoder = decoder_of(settings)
        self.options = Options(backend=backend, precision=settings.precision)
        self.batch_size = min(settings.batch_size, len(graph.train))
        self.steps_per_epoch = -(-len(graph.train) // self.batch_size)
        features = FeatureStore()
        if graph.features is not None:
            features = FeatureStore.from_arrays({NODE: graph.features})
        whole = settings.full_batch
        self.inputs = Inputs(
            graph.topology,
            features,
            jnp.asarray(graph.edge_type),
            jnp.asarray(graph.senders) if whole else None,
            jnp.asarray(graph.receivers) if whole else None,
            jnp.asarray(graph.node_type),
            jnp.asarray(graph.train),
            jnp.asarray(graph.train_edge),
            pool_of(graph),
        )
        self._split_model()
        self._optimizer, self._of_rows = optax.adam(settings.lr), adam(settings.lr)
        self.capacities = (
            None if whole else self._find_capacities(graph.topology, self._capacity_batches(), print_table)
        )
        self._encode = jax.jit(self._encoded)

    def _model(self, key: Array) -> LinkModel:
        graph = self.graph
        width = None if graph.features is None else graph.features.shape[1]
        kinds = len(graph.data.num_nodes)
        return LinkModel(self.settings, graph.num_relations, kinds, width, options=self.options, rngs=nnx.Rngs(key))

    def _capacity_batches(self) -> list[Any]:
        rng = np.random.default_rng(0)
        batches: list[Any] = []
        for _ in range(CAPACITY_BATCHES):
            rows = rng.choice(len(self.graph.train), self.batch_size, replace=False)
            ends = jnp.asarray(self.graph.train[rows][:, [2, 0]].T)
            wrong, _, _ = draw(jax.random.key(len(batches)), self.inputs, ends[0], self.settings)
            batches.append((NODE, jnp.concatenate([ends.reshape(-1), wrong])))
        return batches

    # -------------------------------------------------------------------------------------------- state

    def init(self, seed: int) -> LinkState:
        """The state before the first step of the run with this seed."""
        key, own = jax.random.split(jax.random.key(seed))
        params = jax.jit(lambda key: nnx.state(self._model(key), nnx.Param))(key)
        embeddings = FeatureStore()
        if self.graph.features is None:
            embeddings = embeddings.embedding(NODE, self.graph.num_nodes, self.settings.hidden, seed=seed)
        zero = jnp.zeros((), jnp.int32)
        return LinkState(
            params,
            jax.jit(self._optimizer.init)(params),
            embeddings,
            embeddings.init(self._of_rows),
            zero,
            jax.random.key_data(own),
            jnp.zeros(()),
            jnp.zeros((), jnp.int32),
        )

    def exported(self, state: LinkState) -> dict[str, Any]:
        """A state as plain arrays, for a checkpoint."""
        tables = {}
        for kind, moments in state.moments.items():
            tables[kind] = {"table": state.embeddings[kind].table.numpy(), "step": moments.step}
            tables[kind] |= {"first": moments.first.numpy(), "second": moments.second.numpy()}
        scalars = {name: getattr(state, name) for name in _SCALARS}
        return {"params": state.params, "opt_state": state.opt_state, "tables": tables, **scalars}

    def imported(self, plain: dict[str, Any], seed: int) -> LinkState:
        """The state of `exported`. `seed` makes the tables that are then overwritten."""
        state, moments = self.init(seed), {}
        for kind, of_type in state.moments.items():
            own = plain["tables"][kind]
            tables: list[tuple[Any, str]] = [(state.embeddings[kind].table, "table"), (of_type.first, "first")]
            for table, name in tables:
                table.write(0, np.asarray(own[name]))
            of_type.second.write(0, np.asarray(own["second"]))
            moments[kind] = of_type._replace(step=jnp.asarray(own["step"]))
        scalars = [jnp.asarray(plain[name]) for name in _SCALARS]
        return LinkState(plain["params"], plain["opt_state"], state.embeddings, moments, *scalars)

    # -------------------------------------------------------------------------------------------- a step

    def step(self, state: LinkState, inputs: Inputs, order: Array) -> LinkState:
        """One step: samples, rows, encoder, scores, Adam's updates. It runs inside `jax.jit`.

        Args:
            state: donate it.
            inputs: the data.
            order: int32[steps_per_epoch * batch], the training triples in the epoch's order, -1 for padding.
        """
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        negative_key, sample_key, dropout_key = jax.random.split(key, 3)
        within = state.step % self.steps_per_epoch
        rows = jax.lax.dynamic_slice(order, (within * self.batch_size,), (self.batch_size,))
        mask = rows >= 0
        head, relation, tail = inputs.triples[jnp.maximum(rows, 0)].T
        # Every other edge keeps its receiver and gets wrong senders.
        flipped = jnp.arange(self.batch_size) % 2 == 1
        kept, true = jnp.where(flipped, tail, head), jnp.where(flipped, head, tail)
        kept, true = (jnp.where(mask, nodes, -1) for nodes in (kept, true))
        wrong, places, there = draw(negative_key, inputs, true, self.settings)
        there &= mask[:, None]
        seeds = jnp.concatenate([kept, true, wrong])
        excluded = jnp.where(mask, inputs.triple_edge[jnp.maximum(rows, 0)], inputs.edge_type.shape[0])
        graphs, ids, positions, lost = self._neighbourhood(sample_key, inputs, seeds, (kept, true), excluded)
        x = (state.embeddings | inputs.features).gather({NODE: ids}, dtype=jnp.float32)[NODE]
        node_type = inputs.node_type[jnp.maximum(ids, 0)]

        def loss_of(params: Any, x: Array) -> Array:
            model = self._merged(params)
            h = model.encode(graphs, model.inputs(x, node_type), rngs=nnx.Rngs(dropout=dropout_key))[positions]
            own, right = h[: self.batch_size], h[self.batch_size : 2 * self.batch_size]
            r = model.relation(relation)
            positive = self._scores(own, r, right, flipped)
            others = h[self.batch_size :][places]
            r = None if r is None else r[:, None]
            negative = self._scores(own[:, None], r, others, flipped[:, None])
            loss = softmax_cross_entropy if self.settings.loss == "softmax" else binary_cross_entropy
            return loss(positive, negative, mask=mask, negative_mask=there)

        loss, (gradient, of_rows) = jax.value_and_grad(loss_of, (0, 1))(state.params, x)
        updates, opt_state = self._optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        embeddings, moments = state.embeddings.update(self._of_rows, {NODE: ids}, {NODE: of_rows}, state.moments)
        sums = jnp.where(within == 0, 0.0, state.loss) + loss, state.lost + lost
        return LinkState(params, opt_state, embeddings, moments, state.step + 1, state.key, *sums)

    def _scores(self, kept: Array, relation: Array | None, other: Array, flipped: Array) -> Array:
        score = self.decoder.score
        return jnp.where(flipped, score(other, relation, kept), score(kept, relation, other))

    def _neighbourhood(
        self, key: Array, inputs: Inputs, seeds: Array, pairs: tuple[Array, Array], excluded: Array
    ) -> tuple[Graphs, Array, Array, Array]:
        """The graph of each layer, ids of nodes, and where the encoder's result has the seeds.

        None has an edge to predict or its reverse.
        """
        layers, count = self.settings.layers, self.graph.num_nodes
        if inputs.senders is not None:
            edges = inputs.edge_type.shape[0]
            kept = jnp.ones(edges, bool).at[jnp.concatenate([excluded, excluded + edges // 2])].set(False, mode="drop")
            graph = RelGraph.build_traced(
                inputs.senders,
                inputs.receivers,
                inputs.edge_type,
                num_nodes=count,
                num_edge_types=2 * self.graph.num_relations,
                edge_mask=kept,
            )
            return [(graph, None)] * layers, jnp.arange(count, dtype=jnp.int32), seeds, jnp.zeros((), jnp.int32)
        both = (jnp.concatenate(pairs), jnp.concatenate(pairs[::-1]))
        sample = sample_blocks(
            key,
            inputs.topology,
            (NODE, seeds),
            list(self.settings.fan_outs),
            capacities=self.capacities,
            exclude={EDGE: both},
            options=self._sample_options,
        )
        blocks = make_typed_blocks(inputs.topology, sample, inputs.edge_type, 2 * self.graph.num_relations)
        graphs: Graphs = [(block.graph, block.num_destinations) for block in blocks]
        return graphs, sample.node_ids[NODE], sample.seed_positions[NODE], sample.lost.sum(dtype=jnp.int32)

    # -------------------------------------------------------------------------------------------- a run

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The training triples of an epoch in random order, padded to whole batches."""
        room = np.full(self.steps_per_epoch * self.batch_size, -1, np.int32)
        room[: len(self.graph.train)] = np.random.default_rng([seed, epoch]).permutation(len(self.graph.train))
        return room

    def evaluated(self, state: LinkState, epoch: int, last: bool) -> tuple[float, dict[str, float]]:
        """The mean loss of the epoch, and the filtered MRR of validation edges as "valid"; nan where it is not due."""
        wanted = (last or epoch % self.settings.eval_every == 0) and len(self.graph.splits["valid"])
        mrr = self.ranks(state, "valid", self.settings.eval_edges, progress=False).mrr if wanted else float("nan")
        return float(state.loss) / self.steps_per_epoch, {"valid": mrr}

    # -------------------------------------------------------------------------------------------- ranks

    def _encoded(self, params: Any, x: Array, graph: RelGraph, node_type: Array) -> Array:
        model = self._merged(params)
        return model.encode([(graph, None)] * self.settings.layers, model.inputs(x, node_type))

    def encode(self, state: LinkState) -> Array:
        """[nodes, hidden], from the whole graph of training edges, on the device."""
        graph = self._whole()
        x = np.asarray(self.graph.features) if NODE in self.inputs.features else state.embeddings[NODE].table.numpy()
        return self._encode(state.params, jnp.asarray(x, jnp.float32), graph, self.inputs.node_type)

    def _whole(self) -> RelGraph:
        if not hasattr(self, "_whole_graph"):
            own = self.graph
            self._whole_graph = RelGraph.from_edges(
                own.senders,
                own.receivers,
                own.edge_type,
                num_nodes=own.num_nodes,
                num_edge_types=2 * own.num_relations,
            )
        return self._whole_graph

    def ranks(self, state: LinkState, split: str, most: int = 0, *, progress: bool | None = None) -> LinkRanks:
        """Filtered ranks of the triples of a split, among the nodes of the right types.

        Args:
            state: the state.
            split: valid or test.
            most: how many triples, in random order; 0: all.
            progress: draw a bar; None draws on a terminal only.
        """
        graph, triples = self.graph, self.graph.splits[split]
        if most and len(triples) > most:
            triples = triples[np.random.default_rng(0).permutation(len(triples))[:most]]
        known = np.concatenate([graph.train, *graph.splits.values()])
        nodes = self.encode(state)
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


_SCALARS = ("step", "key", "loss", "lost")
