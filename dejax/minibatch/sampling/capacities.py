"""`find_capacities`: how many nodes of each type the hops of a batch find, and how many edges its blocks have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from dejax.minibatch.sampling._layout import Capacities, FanOuts
from dejax.minibatch.sampling.sample import (
    SampledBlocks,
    SampleOptions,
    _checked_pairs,
    _checked_seeds,
    _checked_times,
    sample_blocks,
)
from dejax.minibatch.topology.hetero_topology import HeteroTopology

# Sizes are multiples of this many nodes, so that two runs mostly compile the same program.
_ROUNDED = 64


def find_capacities(
    key: Array,
    topology: HeteroTopology,
    batches: Iterable[Any],
    fan_outs: FanOuts,
    *,
    sigmas: float = 5.0,
    print_table: Callable[[str], None] | None = print,
    **keywords: Any,
) -> Capacities:
    """Finds array sizes that fit almost all samples, by drawing samples of some batches. Call it once before training.

    The bound for the number of nodes (of each hop and node type) and of edges (of each block) is the mean plus `sigmas`
    standard deviations. Without bounds, the arrays of a sample have room for the largest possible sample, which is
    several times as large as a typical one, because nodes share neighbours and many have fewer than `fan_out`. A sample
    that exceeds a bound loses some nodes or edges; `SampledBlocks.lost` and `lost_edges` count them.

    Args:
        key: jax.random key.
        topology: the graph.
        batches: about 20 batches of seeds, in the form that `sample_blocks` takes, all of one shape.
        fan_outs: as in `sample_blocks`.
        sigmas: number of standard deviations above the mean.
        print_table: function that gets a table of the bounds as text; None for no table.
        **keywords: further arguments of `sample_blocks`, the same for all batches; `seed_times` may be a function that
            returns the times of a batch.

    Returns:
        The bounds, for the argument `capacities` of `sample_blocks`.

    Raises:
        ValueError: there are no batches.
    """

    @partial(jax.jit, static_argnums=2)
    def counted(key: Array, topology: HeteroTopology, treedef: Any, leaves: list[Array]) -> SampledBlocks:
        seeds, rest = jax.tree.unflatten(treedef, leaves)
        return sample_blocks(key, topology, seeds, fan_outs, **rest, **static)

    seed_times, pairs = keywords.pop("seed_times", "required"), _checked_pairs(topology, keywords.pop("exclude", None))
    exclude = {topology.edge_types[number]: ends for number, ends in pairs.items()}
    options = keywords.get("options", SampleOptions())
    static, found, edges, sample = keywords, [], [], None
    for number, batch in enumerate(batches):
        # Convert lists and 64-bit ids first: jit would treat a list as a pytree, and drop the upper bits of ids.
        seeds = _checked_seeds(topology, batch)
        of_batch = seed_times(batch) if callable(seed_times) else seed_times
        times = _checked_times(topology, seeds, of_batch, options)
        leaves, treedef = jax.tree.flatten((seeds, {"exclude": exclude, "seed_times": times}))
        sample = counted(jax.random.fold_in(key, number), topology, treedef, leaves)
        found.append(np.asarray(sample.found))
        edges.append(np.asarray(sample.edges_found))
    if sample is None:
        raise ValueError("find_capacities: `batches` must have at least one batch, got none")
    slots = np.cumsum([own.shape[0] for own in sample.slots])
    nodes = _CapacityBounds.of(np.stack(found), np.array(sample.layout.sizes), sigmas)
    of_edges = _CapacityBounds.of(np.stack(edges), np.maximum(slots, 1), sigmas)
    if print_table is not None:
        print_table(_table(sample, nodes, of_edges))
    names = sample.layout.node_types
    return Capacities(
        {name: tuple(nodes.bound[1:, at].tolist()) for at, name in enumerate(names)},
        edges=np.maximum(of_edges.bound, 1).tolist(),
        source_pairs=_source_pairs(sample),
    )


def _source_pairs(sample: SampledBlocks) -> list[int]:
    """The different pairs of a relation and a sender of each block of a sample, 1 at least."""
    layout = sample.layout
    seen, counts = np.zeros(0, np.int64), []
    for hop, senders in enumerate(sample.slots):
        pieces = layout.of_hop(hop)
        relation = [(piece.relation, layout.receivers(piece) * piece.fan_out) for piece in pieces]
        relations = (
            np.repeat(*(np.array(some, np.int64) for some in zip(*relation, strict=True))) if pieces else seen[:0]
        )
        own = np.asarray(senders, np.int64)
        pairs = (relations * layout.count(layout.num_hops) + own)[own >= 0]
        seen = np.union1d(seen, pairs)
        counts.append(max(1, seen.size))
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class _CapacityBounds:
    """How much room some batches need, and the bounds that follow from it: arrays of one shape.

    Attributes:
        mean, deviation: over the batches.
        bound: the room that later batches get.
        natural: the most that a batch can need.
    """

    mean: np.ndarray
    deviation: np.ndarray
    bound: np.ndarray
    natural: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, natural: np.ndarray, sigmas: float) -> _CapacityBounds:
        """The bounds that follow from the counts of each batch, int[batches, ...]."""
        mean, deviation = counts.mean(axis=0), counts.std(axis=0)
        bound = np.ceil((mean + sigmas * deviation) / _ROUNDED) * _ROUNDED
        bound = np.minimum(np.maximum(bound, counts.max(axis=0)), natural).astype(int)
        return cls(mean, deviation, bound, natural)

    def cells(self, *at: int) -> str:
        numbers = self.mean[at], self.deviation[at], self.bound[at], self.natural[at]
        return "".join(f"{math.ceil(number):12,}" for number in numbers)


def _table(sample: SampledBlocks, nodes: _CapacityBounds, edges: _CapacityBounds) -> str:
    names = sample.layout.node_types
    width = max(5, *map(len, names))
    lines = [f"hop  {'type':<{width}}        mean   deviation    capacity     at most"]
    for hop in range(1, nodes.mean.shape[0]):
        lines += [f"{hop:>3}  {name:<{width}}{nodes.cells(hop, at)}" for at, name in enumerate(names)]
    lines.append(f"{'':>3}  edges of a block, up to hop")
    lines += [f"{hop + 1:>3}  {'edges':<{width}}{edges.cells(hop)}" for hop in range(edges.mean.shape[0])]
    return "\n".join(lines)
