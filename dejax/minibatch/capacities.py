"""`find_capacities`: how many nodes of each type the hops of a batch find."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from dejax.minibatch._layout import FanOuts
from dejax.minibatch.sampling import (
    SampledBlocks,
    SampleOptions,
    _checked_pairs,
    _checked_seeds,
    _checked_times,
    sample_blocks,
)
from dejax.minibatch.topology import HeteroTopology

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
) -> dict[str, tuple[int, ...]]:
    """Samples some batches, and bounds the nodes of each hop and type by mean + `sigmas` standard deviations.

    Without bounds the arrays of a sample have room for the largest possible one. That is several times a typical one:
    nodes share neighbours, and many have fewer than `fan_out`. A batch that exceeds a bound loses some nodes;
    `SampledBlocks.lost` counts them.

    Args:
        key: jax.random key.
        topology: the graph.
        batches: some 20 batches of seeds, each as `sample_blocks` takes them, all of one shape.
        fan_outs: as in `sample_blocks`.
        sigmas: standard deviations above the mean.
        print_table: takes the table as text; None for no table.
        **keywords: further arguments of `sample_blocks`, the same for all batches.

    Returns:
        For each node type the bound of each hop, for `capacities` of `sample_blocks`.

    Raises:
        ValueError: there are no batches.
    """

    @partial(jax.jit, static_argnums=2)
    def counted(key: Array, topology: HeteroTopology, treedef: Any, leaves: list[Array]) -> SampledBlocks:
        seeds, rest = jax.tree.unflatten(treedef, leaves)
        return sample_blocks(key, topology, seeds, fan_outs, **rest, **static)

    seed_times, pairs = keywords.pop("seed_times", None), _checked_pairs(topology, keywords.pop("exclude", None))
    exclude = {topology.edge_types[number]: ends for number, ends in pairs.items()}
    options = keywords.get("options", SampleOptions())
    static, found, sample = keywords, [], None
    for number, batch in enumerate(batches):
        # Convert lists and 64-bit ids first: jit would treat a list as a pytree, and drop the upper bits of ids.
        seeds = _checked_seeds(topology, batch)
        times = _checked_times(topology, seeds, seed_times, options)
        leaves, treedef = jax.tree.flatten((seeds, {"exclude": exclude, "seed_times": times}))
        sample = counted(jax.random.fold_in(key, number), topology, treedef, leaves)
        found.append(np.asarray(sample.found))
    if sample is None:
        raise ValueError("find_capacities: `batches` must have at least one batch, got none")
    counts = np.stack(found).astype(np.float64)
    mean, deviation = counts.mean(axis=0), counts.std(axis=0)
    natural = np.array(sample.layout.sizes)
    bound = np.ceil((mean + sigmas * deviation) / _ROUNDED) * _ROUNDED
    bound = np.minimum(np.maximum(bound, counts.max(axis=0)), natural).astype(int)
    if print_table is not None:
        print_table(_table(sample, mean, deviation, bound, natural))
    names = sample.layout.node_types
    return {name: tuple(int(size) for size in bound[1:, at]) for at, name in enumerate(names)}


def _table(sample: SampledBlocks, mean: Any, deviation: Any, bound: Any, natural: Any) -> str:
    names = sample.layout.node_types
    width = max(4, *map(len, names))
    lines = [f"hop  {'type':<{width}}        mean   deviation    capacity     at most"]
    for hop in range(1, mean.shape[0]):
        for at, name in enumerate(names):
            numbers = mean[hop, at], deviation[hop, at], bound[hop, at], natural[hop, at]
            cells = "".join(f"{math.ceil(number):12,}" for number in numbers)
            lines.append(f"{hop:>3}  {name:<{width}}{cells}")
    return "\n".join(lines)
