"""Tasks of links on tables: which rows of a target table an entity will meet next, ranked among all that exist by then.

The entity and each candidate have a vector of their own, from a sample as of the cutoff; a score is their product. A
wrong candidate of a training link is a row that exists at the link's cutoff and that the entity does not meet.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax.datasets import HeteroDataset, Task
from dejax.minibatch import FeatureStore, HeteroTopology, NegativePool, SampledBlocks, softmax_cross_entropy
from dejax.rgnn import Options
from dejax.segment import gather
from dejax.training.metrics import Ranking
from dejax.training.settings import Settings
from dejax.training.state import TrainState
from dejax.training.tables.history import HistoryReader, RowHistory, as_bits
from dejax.training.tables.models import LinkedTablesModel
from dejax.training.tables.prepared import task_of
from dejax.training.tables.task import TableTask
from dejax.training.tasks.task import CAPACITY_BATCHES, Runner, StepView, World, spread_over_steps

with optional("flax", of="dejax.training"):
    from flax import nnx

_VECTORS = "vectors of {}"  # the learned vectors of a table's rows, beside its columns in the feature store
_SCORES = 1 << 24  # of a call, at most


def table_task(
    settings: Settings,
    data: HeteroDataset,
    options: Options,
    print_table: Callable[[str], None] | None = None,
    fitted: Mapping[str, Any] | None = None,
) -> TableTask:
    """The `TableTask` of the settings' target: a `TableLinkTask` where it is a task of links. Arguments as there."""
    make = TableLinkTask if task_of(data, settings.target).kind == "link" else TableTask
    return make(settings, data, options, print_table, fitted)


class TableLinkTask(TableTask):
    """Predictions of the rows of a target table that rows of an entity table meet after a cutoff.

    A seed of a step is a link of a training example. It gets `Settings.negatives` wrong candidates, drawn among the
    rows that exist at its cutoff, and is compared with those of all links of the step with the same cutoff, so a grid
    of cutoffs gives each link many more. Links to rows that do not exist at their cutoff are not trained on. Each row
    of the target that exists before the last training cutoff has a learned vector beside its columns. Rows that the
    table has got since then, at its end, have none, whenever they came to exist.

    Args:
        settings, data, options, print_table, fitted: as `TableTask`.

    Raises:
        ValueError: as `TableTask`; no training example has a link to a row that exists at its cutoff.
    """

    def __init__(
        self,
        settings: Settings,
        data: HeteroDataset,
        options: Options,
        print_table: Callable[[str], None] | None = None,
        fitted: Mapping[str, Any] | None = None,
    ) -> None:
        self._ranked = jax.jit(_ranked, static_argnums=4)
        target = task_of(data, settings.target).target
        assert target is not None
        self._trained_rows: int = data.num_nodes[target] if fitted is None else fitted["target_rows"]
        super().__init__(settings, data, options, print_table, fitted)
        self._both_vectors = jax.jit(self._vectors_of, static_argnums=0)
        self.embedded = {_VECTORS.format(self._target): data.num_nodes[self._target]}

    @property
    def fitted(self) -> dict[str, Any]:
        """As `TableTask.fitted`, and the number of rows that the target table had."""
        return {**super().fitted, "target_rows": self._trained_rows}

    @property
    def _target(self) -> str:
        assert self.examples.target is not None
        return self.examples.target

    def _labels(self) -> dict[str, Array]:
        examples = self.examples
        assert examples.offsets is not None
        known = self.data.known_from.get(self._target, np.full(self.data.num_nodes[self._target], -(2**63)))
        self._known = np.asarray(known)
        self._learned = (self._known < self.until) & (np.arange(len(self._known)) < self._trained_rows)
        self._pool = NegativePool.from_times(self.clock.relative(self._known))
        self._example = np.repeat(np.arange(len(examples)), np.diff(examples.offsets)).astype(np.int32)
        return {
            "links": jnp.asarray(np.append(examples.labels, -1), jnp.int32),
            "offsets": jnp.asarray(examples.offsets, jnp.int32),
            "new": jnp.asarray(~self._learned),
        }

    def _trained_on(self, show: Callable[[str], None] | None) -> np.ndarray:
        """The places in `labels` of training examples' links to rows that exist at their cutoffs."""
        examples = self.examples
        training = np.zeros(len(examples), bool)
        training[self.splits["train"]] = True
        links = np.flatnonzero(training[self._example])
        there = self._known[examples.labels[links]] <= examples.times[self._example[links]]
        if not there.any():
            raise ValueError(
                f"task {examples.name!r} must have training links to rows of {self._target!r} that are known by their "
                f"cutoffs, got none among {len(links)} links; check the times of {self._target!r}, or move "
                "`valid_from` and `test_from`"
            )
        if show is not None and not there.all():
            show(
                f"{int((~there).sum()):,} of {len(there):,} training links lead to rows of {self._target} that are not "
                "known by their cutoffs: left out"
            )
        return links[there].astype(np.int32)

    def _rows_with_parameters(self) -> str:
        rows = np.flatnonzero(self._learned)
        keys = np.asarray(self.data.keys[self._target])[rows] if self._target in self.data.keys else rows
        return hashlib.sha256(repr((rows.tolist(), keys.tolist())).encode()).hexdigest()

    def model(self, key: Array) -> LinkedTablesModel:
        """The model of both ends."""
        ends = (self.examples.entity, self._target)
        more = {"day": self.clock.day, "options": self.options, "rngs": nnx.Rngs(key)}
        return LinkedTablesModel(self.settings, self.plans, self._history_plans, self._edge_types, *ends, **more)

    # -------------------------------------------------------------------------------------------- a step

    def order(self, seed: int, epoch: int) -> Any:
        """The training links of an epoch in random order, with wrong candidates."""
        rng = np.random.default_rng([seed, epoch])
        links = spread_over_steps(rng.permutation(self._train), self.steps_per_epoch, self._batch)
        return self._with_history(self._seeds_of_links(links, rng), self._readers)

    def _history_of_examples(self) -> dict[str, np.ndarray]:
        """{}: candidates are drawn anew for each epoch."""
        return {}

    def _whole_history(self, topology: HeteroTopology, table: str) -> RowHistory:
        """Counts alone: a link has no label by which numbers of columns could be chosen."""
        return RowHistory.of(self.data, topology, table)

    def _wanted(self, history: RowHistory, some: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return history.are_counts

    def _with_history(self, seeds: dict[str, Any], readers: Mapping[str, HistoryReader]) -> dict[str, Any]:
        """Seeds with the history of entities and of candidates, the bits of packed rows, int32[..., width]."""
        found = {}
        for ends, table in self._ends:
            if table in readers:
                rows, times = seeds[ends], seeds["times"].reshape(-1)
                packed = readers[table].packed(rows.reshape(-1), np.repeat(times, rows.size // times.size))
                found[ends] = as_bits(packed).reshape(*rows.shape, -1)
        return {**seeds, "history": found}

    def _history_by_table(self, seeds: Any) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for ends, table in self._ends:
            if ends in seeds["history"]:
                rows = seeds["history"][ends]
                rows = rows.reshape(-1, rows.shape[-1])
                found[table] = jnp.concatenate([found[table], rows]) if table in found else rows
        return found

    @property
    def _ends(self) -> tuple[tuple[str, str], ...]:
        """The two ends of links in seeds, and their tables."""
        return ("entities", self.examples.entity), ("targets", self._target)

    def _seeds_of_links(self, links: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Seeds, of places in `labels`, -1 for padding: the candidates of a link are its own and wrong ones."""
        there, example = links >= 0, self._example[links]
        times = self.clock.cutoffs(np.where(there, self.examples.times[example], self.examples.times[0]))
        key = jax.random.key(int(rng.integers(2**31)))
        wrong = np.asarray(self._pool.draw(key, times.reshape(-1), self.settings.negatives))
        targets = np.concatenate(
            [self.examples.labels[links][..., None], wrong.reshape(*links.shape, self.settings.negatives)], axis=-1
        )
        return {
            "entities": np.where(there, self.examples.rows[example], -1).astype(np.int32),
            "targets": np.where(there[..., None], targets, -1).astype(np.int32),
            "times": times,
            "examples": np.where(there, example, -1).astype(np.int32),
        }

    def _by_table(self, seeds: Any, xp: Any = jnp) -> tuple[dict[str, Any], dict[str, Any]]:
        """The ids and times of a step's seeds by table: entities, and candidates one link after the other."""
        ids = {self.examples.entity: seeds["entities"]}
        times = {self.examples.entity: seeds["times"]}
        of_targets = seeds["targets"].reshape(-1)
        when = xp.repeat(seeds["times"], seeds["targets"].shape[-1])
        if self._target in ids:
            of_targets = xp.concatenate([seeds["entities"], of_targets])
            when = xp.concatenate([seeds["times"], when])
        return {**ids, self._target: of_targets}, {**times, self._target: when}

    def _capacity_batches(self) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Links of each split in turn: later ones see more."""
        rng = np.random.default_rng(0)
        split = np.full(len(self.examples), -1)
        for number, name in enumerate(self.splits):
            split[self.splits[name]] = number
        there = self._known[self.examples.labels] <= self.examples.times[self._example]
        links = [np.flatnonzero(there & (split[self._example] == number)) for number in range(len(self.splits))]
        links = [some for some in links if len(some)]
        batches = (rng.choice(links[number % len(links)], self._part) for number in range(CAPACITY_BATCHES))
        return [self._ids_and_times(some, rng) for some in batches]

    def _ids_and_times(self, places: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._by_table(self._seeds_of_links(places, rng), np)

    def sample(self, key: Array, topology: HeteroTopology, seeds: Any) -> SampledBlocks:
        """The neighbourhoods of entities and candidates, each as of its cutoff."""
        ids, times = self._by_table(seeds)
        return super().sample(key, topology, {"ids": ids, "times": times})

    def view(self, topology: HeteroTopology | None, data: Any, seeds: Any, sample: SampledBlocks | None) -> StepView:
        """As `TableTask`, with the learned vectors of the target's rows; -1 for rows that training does not know."""
        found = super().view(topology, data, seeds, sample)
        own = found.ids[self._target]
        own = jnp.where((own >= 0) & ~data["new"][jnp.maximum(own, 0)], own, -1)
        return dataclasses.replace(found, ids={**found.ids, _VECTORS.format(self._target): own})

    def _vectors(self, model: Any, view: StepView, x: Any, seeds: Any, key: Array | None) -> tuple[Array, Array]:
        """The vectors of entities [links, hidden], and of candidates [links x (1 + negatives), hidden]."""
        assert self.world.topology is not None
        _, by_table = self._by_table(seeds)
        times = jnp.concatenate([by_table[name] for name in self.world.topology.node_types if name in by_table])
        cutoffs, more = self._of_trees(view, times)
        deterministic = key is None or not self.settings.dropout
        rngs = None if key is None else nnx.Rngs(dropout=key)
        added = {self._target: x[_VECTORS.format(self._target)]}
        entities, targets = model(view.graphs, x, cutoffs, added=added, **more, deterministic=deterministic, rngs=rngs)
        count = seeds["entities"].shape[0]
        of_targets = view.positions[self._target]
        if self._target == self.examples.entity:
            of_targets = of_targets[count:]
        return gather(entities, view.positions[self.examples.entity][:count]), gather(targets, of_targets)

    def loss(
        self, model: Any, view: StepView, x: dict[str, Array], seeds: Any, data: Any, key: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """Mean cross-entropy of each link among the wrong candidates of its cutoff."""
        entities, targets = self._vectors(model, view, x, seeds, key)
        links, each = seeds["targets"].shape
        scores = (entities @ targets.T).reshape(links, links, each)
        own = jnp.arange(links)
        wrong, there = seeds["targets"][:, 1:], seeds["examples"] >= 0
        counts = (seeds["times"][:, None] == seeds["times"])[:, :, None] & (wrong >= 0)
        counts &= ~_among_links(data, seeds["examples"], wrong)
        loss = softmax_cross_entropy(
            scores[own, own, 0],
            scores[:, :, 1:].reshape(links, -1),
            mask=there,
            negative_mask=counts.reshape(links, -1),
        )
        return loss, (there.sum().astype(jnp.float32), {})

    # -------------------------------------------------------------------------------------------- predictions

    def _vectors_of(
        self, trainer: Runner, key: Array, params: Any, embeddings: FeatureStore, world: World, seeds: Any
    ) -> tuple[Array, Array]:
        view, x = self.seen(trainer, key, embeddings, world, seeds)
        return self._vectors(trainer.merged(params), view, x, seeds, None)

    def _predictions(
        self,
        trainer: Runner,
        state: TrainState,
        places: np.ndarray,
        examples: Task,
        world: World,
        readers: Mapping[str, HistoryReader],
    ) -> Ranking:
        """The best candidates of examples, among all rows of the target that are known by their cutoffs.

        All candidates get a vector for each different cutoff, so a grid of cutoffs is much faster than a cutoff of its
        own for each example.
        """
        assert examples.offsets is not None
        count, k = len(places), self.settings.top
        rows, scores = np.full((count, k), -1, np.int32), np.zeros((count, k), np.float32)
        first = np.full(count, np.inf)
        cutoffs = examples.times[places]
        for cutoff in np.unique(cutoffs):
            asked = np.flatnonzero(cutoffs == cutoff)
            candidates = np.flatnonzero(self._known <= cutoff)
            if not len(candidates):
                continue
            vectors = self._both(trainer, state, world, readers, examples.rows[places[asked]], candidates, cutoff)
            links = self._places_of_links(examples, places[asked], candidates)
            part = max(1, min(_SCORES // len(vectors[1]), 1 << (len(asked) - 1).bit_length()))
            for at in range(0, len(asked), part):
                some = slice(at, at + part)
                found = self._ranked(*(_padded(of, part) for of in (vectors[0][some], links[some])), *vectors[1:], k)
                best, values, ranks = (np.asarray(of)[: len(asked[some])] for of in found)
                width = best.shape[1]
                there = best < len(candidates)
                rows[asked[some], :width] = np.where(there, candidates[np.minimum(best, len(candidates) - 1)], -1)
                scores[asked[some], :width] = np.where(there, values, 0.0)
                first[asked[some]] = ranks
        return Ranking(rows, scores, self._hits(examples, places, rows), first)

    def _both(
        self,
        trainer: Runner,
        state: TrainState,
        world: World,
        readers: Mapping[str, HistoryReader],
        entities: np.ndarray,
        targets: np.ndarray,
        cutoff: int,
    ) -> tuple[np.ndarray, Array, int]:
        """The vectors of entities, of candidates (padded), and the number of candidates, at one cutoff."""
        each = 1 + self.settings.negatives
        width = self._part * each
        calls = max(-(-len(entities) // self._part), -(-len(targets) // width))
        own = np.full(calls * self._part, -1, np.int32)
        own[: len(entities)] = entities
        # Candidates in random order, and padding in all calls, so that samples are of about one size.
        others = spread_over_steps(np.random.default_rng(0).permutation(targets), calls, width).reshape(-1)
        times = self.clock.cutoffs(np.full(self._part, cutoff))
        found: list[tuple[Array, Array]] = []
        for call in range(calls):
            seeds = {
                "entities": own[call * self._part : (call + 1) * self._part],
                "targets": others[call * width : (call + 1) * width].reshape(self._part, each),
                "examples": np.full(self._part, -1, np.int32),
                "times": times,
            }
            seeds = self._with_history(seeds, readers)
            key = jax.random.fold_in(jax.random.key(0), call)
            found.append(self._both_vectors(trainer, key, state.params, state.embeddings, world, seeds))
        there = np.flatnonzero(others >= 0)
        place = there[np.argsort(others[there])]  # of each candidate among the vectors; candidates ascend
        place = np.pad(place, (0, len(others) - len(place)))  # as many in the next call, so nothing is compiled again
        vectors = jnp.concatenate([some for _, some in found])[jnp.asarray(place)]
        return np.concatenate([np.asarray(some) for some, _ in found])[: len(entities)], vectors, len(targets)

    def _places_of_links(self, examples: Task, places: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """int32[examples, most links], the places of each example's links among the candidates; -1 for none."""
        assert examples.offsets is not None
        place = np.full(self.data.num_nodes[self._target], -1, np.int32)
        place[candidates] = np.arange(len(candidates))
        counts = np.diff(examples.offsets)[places]
        most = 1 << int(max(counts.max(initial=1) - 1, 0)).bit_length()
        found = np.full((len(places), most), -1, np.int32)
        at = np.arange(most) < counts[:, None]
        found[at] = place[examples.labels[(examples.offsets[places][:, None] + np.arange(most))[at]]]
        return found

    def _hits(self, examples: Task, places: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Which of the listed rows are links of their examples."""
        assert examples.offsets is not None
        width, counts = self.data.num_nodes[self._target], np.diff(examples.offsets)
        links = np.repeat(np.arange(len(examples), dtype=np.int64), counts) * width + examples.labels
        return np.isin(np.where(rows >= 0, places[:, None] * np.int64(width) + rows, -1), links)


def _among_links(data: Any, examples: Array, rows: Array) -> Array:
    """bool[examples, ...], which rows are links of each example (-1 for none)."""
    first = data["offsets"][jnp.maximum(examples, 0)]
    count = jnp.where(examples >= 0, data["offsets"][jnp.maximum(examples, 0) + 1] - first, 0)
    shape = (examples.shape[0],) + (1,) * rows.ndim

    def compared(number: Array, found: Array) -> Array:
        link = jnp.where(number < count, data["links"][first + jnp.minimum(number, count)], -2)
        return found | (link.reshape(shape) == rows)

    return jax.lax.fori_loop(0, count.max(initial=0), compared, jnp.zeros((examples.shape[0], *rows.shape), bool))


def _ranked(entities: Array, links: Array, targets: Array, count: int, k: int) -> tuple[Array, Array, Array]:
    """The `k` best of the first `count` candidates of each entity, their scores, and the rank of its best link."""
    scores = jnp.matmul(entities, targets.T, precision="highest")
    scores = jnp.where(jnp.arange(scores.shape[1]) < count, scores, -jnp.inf)
    values, best = jax.lax.top_k(scores, min(k, scores.shape[1]))
    of_links = jnp.take_along_axis(scores, jnp.maximum(links, 0), axis=1)
    own = jnp.where(links >= 0, of_links, -jnp.inf).max(1, keepdims=True)
    above, equal = (scores > own).sum(1), (scores == own).sum(1)
    ranks = jnp.where((links >= 0).any(1), above + (equal + 1) / 2, jnp.inf)
    return jnp.where(jnp.arange(best.shape[1]) < count, best, scores.shape[1]), values, ranks


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((rows - len(values), *values.shape[1:]), values.dtype)])
