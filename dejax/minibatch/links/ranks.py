"""Filtered ranks of triples against all entities: MRR and Hits@k."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax._pytrees import pytree
from dejax.datasets.files._work import Progress
from dejax.minibatch.links.decoders import DECODERS, Decoder

_SCORES = 1 << 27  # of a batch against all candidates, by default: 512 MiB in float32
# A product on the CPU adds in another order in columns that do not fill a vector: equal candidates had unequal scores.
_CANDIDATES = 128


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LinkRanks:
    """The ranks of triples that `link_ranks` computes. Rank 1 is best; entities with equal scores get their mean rank.

    Attributes:
        tail: float64[n], the rank of each triple's tail among all tails; empty if tails were not ranked.
        head: float64[n], the rank of each triple's head among all heads; empty if heads were not ranked.

    >>> import jax.numpy as jnp
    >>> from dejax.minibatch import link_ranks
    >>> entities = jnp.array([[1.0], [2.0], [3.0]])
    >>> ranks = link_ranks("dot", entities, None, entities, [[0, 0, 2], [1, 0, 1]])
    >>> ranks.tail, ranks.head
    (array([1., 2.]), array([3., 2.]))
    """

    tail: np.ndarray
    head: np.ndarray

    @property
    def ranks(self) -> np.ndarray:
        """float64[n or 2 n]: the ranks of tails, then the ranks of heads."""
        return np.concatenate([self.tail, self.head])

    @property
    def mrr(self) -> float:
        """The mean reciprocal rank, over tails and heads; NaN without triples."""
        return float(np.mean(1 / self.ranks)) if self.ranks.size else float("nan")

    @property
    def mean_rank(self) -> float:
        """The mean rank, over tails and heads; NaN without triples."""
        return float(np.mean(self.ranks)) if self.ranks.size else float("nan")

    def hits(self, k: float) -> float:
        """Hits@k, the share of ranks that are at most k, over tails and heads; NaN without triples."""
        return float(np.mean(self.ranks <= k)) if self.ranks.size else float("nan")

    def __repr__(self) -> str:
        hits = ", ".join(f"hits@{k}={self.hits(k):.4f}" for k in (1, 3, 10))
        return f"LinkRanks(ranks={self.ranks.size}, mrr={self.mrr:.4f}, {hits}, mean_rank={self.mean_rank:.1f})"


def link_ranks(
    decoder: str | Decoder,
    heads: ArrayLike,
    relations: ArrayLike | None,
    tails: ArrayLike,
    triples: ArrayLike,
    *,
    known: ArrayLike | None = None,
    sides: Sequence[str] = ("tail", "head"),
    batch_size: int | None = None,
    progress: bool | None = None,
) -> LinkRanks:
    """Ranks the tail of each triple by its score among all entities, and the head in the same way.

    * Filtered: entities that would make another known triple do not count (Bordes et al. 2013).
    * Ties: each entity with an equal score counts one half. So a constant score gives the mean rank, not the best one.
    * NaN: an entity whose score is NaN ranks above the true one. A triple whose own score is NaN ranks last.

    Args:
        decoder: "dot", "distmult", "complex", "rotate", or a `Decoder`.
        heads: float[num_heads, d], the embeddings of all entities that may be heads.
        relations: float[num_relations, d'], the vectors of the relations; None for "dot".
        tails: float[num_tails, d], the embeddings of all entities that may be tails; often the same array as `heads`.
        triples: int[n, 3], rows of (head, relation, tail), the triples to rank. Relations are 0 for "dot".
        known: int[m, 3], all true triples: of training, validation and test. None: ranks are not filtered.
        sides: which of "tail" and "head" to rank.
        batch_size: number of triples that are scored at once, each against all entities. By default such that a batch
            has 2^27 scores.
        progress: whether to draw a progress bar; None draws if stderr is a terminal.

    Raises:
        ValueError: the decoder or a side is unknown, an array has another shape, or an id is out of range.

    >>> entities = jnp.array([[1.0], [2.0], [3.0]])
    >>> link_ranks("dot", entities, None, entities, [[0, 0, 1]], sides=["tail"]).tail
    array([2.])
    """
    found = DECODERS.get(decoder) if isinstance(decoder, str) else decoder
    if found is None:
        raise ValueError(f"link_ranks: `decoder` must be one of {', '.join(DECODERS)}, got {decoder!r}")
    arrays = _Arrays.checked(found, heads, relations, tails)
    counts = (arrays.heads.shape[0], arrays.num_relations, arrays.tails.shape[0])
    rows = _checked_triples("triples", triples, counts)
    true = rows[:0] if known is None else _checked_triples("known", known, counts)
    if unknown := set(sides) - {"tail", "head"}:
        raise ValueError(f"link_ranks: `sides` must be of 'tail' and 'head', got {sorted(unknown)[0]!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"link_ranks: `batch_size` must be at least 1, got {batch_size}")
    size = batch_size or max(1, min(1024, _SCORES // max(1, *counts)))
    size = min(size, max(1, len(rows)))
    ranks = {"tail": np.zeros(0), "head": np.zeros(0)}
    with Progress("rank links", len(rows) * len(set(sides)), unit="triples", enabled=progress) as bar:
        for side in ranks:
            if side in sides:
                ranks[side] = _ranks_of(found, arrays, rows, true, side, size, bar)
    return LinkRanks(**ranks)


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Arrays:
    """Embeddings on the device."""

    heads: Array
    relations: Array | None
    tails: Array

    @classmethod
    def checked(cls, decoder: Decoder, heads: ArrayLike, relations: ArrayLike | None, tails: ArrayLike) -> _Arrays:
        h, t = _wide(heads), _wide(tails)
        if h.ndim != 2 or t.ndim != 2 or h.shape[1] != t.shape[1]:
            raise ValueError(
                f"link_ranks: `heads` and `tails` must be [entities, d] of one width, got {h.shape} and {t.shape}"
            )
        width = decoder.relation_width(h.shape[1])
        if relations is None:
            if width:
                raise ValueError(f"link_ranks: `relations` must be [relations, {width}] for {decoder.name}, got None")
            return cls(h, None, t)
        r = _wide(relations)
        if not width:
            raise ValueError(f"link_ranks: `relations` must be None for {decoder.name}, got {r.shape}")
        if r.ndim != 2 or r.shape[1] != width:
            raise ValueError(f"link_ranks: `relations` must be [relations, {width}] for {decoder.name}, got {r.shape}")
        return cls(h, r, t)

    @property
    def num_relations(self) -> int:
        return 1 if self.relations is None else self.relations.shape[0]


def _wide(embeddings: ArrayLike) -> Array:
    """Embeddings in float32 at least: scores of 16 bits would be equal for entities that are not."""
    given = jnp.asarray(embeddings)
    return given.astype(jnp.promote_types(given.dtype, jnp.float32))


def _checked_triples(name: str, given: ArrayLike, counts: tuple[int, int, int]) -> np.ndarray:
    """int64[n, 3]."""
    rows = np.asarray(given)
    rows = rows.reshape(0, 3) if rows.size == 0 else rows
    if rows.ndim != 2 or rows.shape[1] != 3 or (rows.size and rows.dtype.kind not in "iu"):
        raise ValueError(f"link_ranks: `{name}` must be integers [n, 3], got {rows.shape} of {rows.dtype}")
    rows = rows.astype(np.int64)
    for column, (what, count) in enumerate(zip(("heads", "relations", "tails"), counts, strict=True)):
        if len(rows) and not 0 <= rows[:, column].min() <= rows[:, column].max() < count:
            raise ValueError(
                f"link_ranks: {what} of `{name}` must be from 0 to {count - 1}, got {rows[:, column].min()} to "
                f"{rows[:, column].max()}"
            )
    return rows


def _ranks_of(
    decoder: Decoder, arrays: _Arrays, rows: np.ndarray, known: np.ndarray, side: str, size: int, bar: Progress
) -> np.ndarray:
    """float64[n], the ranks of one side."""
    asked, target = (0, 2) if side == "tail" else (2, 0)
    filters = _Filters.of(known, asked, target)
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    # One shape for all batches: one program. Padding repeats a triple; its filters are outside of the batch.
    most = max((filters.count(batch) for batch in batches), default=0)
    room = 1 << max(0, most - 1).bit_length()
    out = np.empty(len(rows))
    # Not kept for later calls: what the functions of a decoder close over may have changed.
    on_cpu = all(device.platform == "cpu" for device in arrays.heads.devices())
    counted = jax.jit(functools.partial(_batch_counts, decoder, side, on_cpu))
    for number, batch in enumerate(batches):
        padded = np.concatenate([batch, np.repeat(batch[:1], size - len(batch), axis=0)])
        row, entity = filters.pairs(batch)
        fill = room - len(row)
        places = np.stack([np.append(row, np.full(fill, size)), np.append(entity, np.zeros(fill, np.int64))])
        counts = counted(arrays, padded.astype(np.int32), places.astype(np.int32))
        better, equal = np.asarray(counts, np.float64)[:, : len(batch)]
        out[number * size : number * size + len(batch)] = 1 + better + equal / 2
        bar.update(len(batch))
    return out


def _batch_counts(decoder: Decoder, side: str, on_cpu: bool, arrays: _Arrays, rows: Array, filtered: Array) -> Array:
    """int32[2, n]: how many entities have a better score, and an equal one.

    Args:
        decoder, side, on_cpu, arrays: static parts and embeddings.
        rows: int32[n, 3].
        filtered: int32[2, m], (row, entity) pairs that do not count; rows out of range are padding.
    """
    relation = None if arrays.relations is None else arrays.relations[rows[:, 1]]
    if side == "tail":
        query, candidates, target = decoder.query_tail(arrays.heads[rows[:, 0]], relation), arrays.tails, rows[:, 2]
    else:
        query, candidates, target = decoder.query_head(arrays.tails[rows[:, 2]], relation), arrays.heads, rows[:, 0]
    count = candidates.shape[0]
    candidates = jnp.pad(candidates, ((0, -count % _CANDIDATES), (0, 0))) if on_cpu else candidates
    scores = decoder.score_all(query, candidates)
    # From the same product: a score that is computed in another way may differ in its last bit, and break a tie.
    own = jnp.take_along_axis(scores, target[:, None], axis=1)
    counts = jnp.broadcast_to(jnp.arange(scores.shape[1]) < count, scores.shape)
    counts = counts.at[filtered[0], filtered[1]].set(False, mode="drop")
    counts = counts.at[jnp.arange(rows.shape[0]), target].set(False)
    better = (counts & ~(scores <= own)).sum(1, dtype=jnp.int32)
    equal = (counts & (scores == own)).sum(1, dtype=jnp.int32)
    return jnp.stack([better, equal])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Filters:
    """The entities that answer each question (entity, relation), sorted by question."""

    keys: np.ndarray  # int64[questions], ascending
    offsets: np.ndarray  # int64[questions + 1]
    entities: np.ndarray
    asked: int  # the column of the entity that is given
    num_relations: int

    @classmethod
    def of(cls, known: np.ndarray, asked: int, target: int) -> _Filters:
        relations = int(known[:, 1].max(initial=0)) + 1
        pairs = np.unique(np.stack([known[:, asked] * relations + known[:, 1], known[:, target]], axis=1), axis=0)
        keys, first = np.unique(pairs[:, 0], return_index=True)
        return cls(keys, np.append(first, len(pairs)), pairs[:, 1], asked, relations)

    def _ranges(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(start, length) of each row's answers."""
        key = np.where(rows[:, 1] < self.num_relations, rows[:, self.asked] * self.num_relations + rows[:, 1], -1)
        place = np.searchsorted(self.keys, key)
        place = np.minimum(place, max(0, len(self.keys) - 1))
        there = self.keys[place] == key if len(self.keys) else np.zeros(len(rows), bool)
        start = np.where(there, self.offsets[place], 0)
        return start, np.where(there, self.offsets[np.minimum(place + 1, len(self.keys))] - start, 0)

    def count(self, rows: np.ndarray) -> int:
        return int(self._ranges(rows)[1].sum())

    def pairs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row of `rows`, entity) of all answers."""
        start, length = self._ranges(rows)
        row = np.repeat(np.arange(len(rows)), length)
        within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        return row, self.entities[np.repeat(start, length) + within]
