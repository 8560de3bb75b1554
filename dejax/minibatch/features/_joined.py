"""`JoinedFeatures`: the features of all node types in one array, in the order of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jax import Array

from dejax._pytrees import pytree
from dejax.minibatch.sampling._layout import SampleLayout
from dejax.minibatch.sampling.sample import rows_of_type


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class JoinedFeatures(Mapping[str, Array]):
    """The features of all nodes of a sample in one array. It is a pytree, and a mapping from node type to rows.

    Use it for layers that take all nodes at once: `Block.join` of the first block returns the array without a copy. In
    contrast, the rows of one type, `x["paper"]`, [papers, n], are copied out of the array.

    Attributes:
        rows: [nodes, *row], in the order of `SampledBlocks.nodes`; zeros for padding.
        layout: the sizes of the sample (static).

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from dejax.minibatch import FeatureStore, HeteroTopology, sample_blocks, sampled_step
    >>> topology = HeteroTopology.from_edges({("a", "to", "b"): ([1, 2], [0, 0])}, {"a": 3, "b": 1})
    >>> store = FeatureStore.from_arrays({"a": np.array([[1.0], [2.0], [4.0]]), "b": np.array([[8.0]])})
    >>> def sample(key, topology, seeds):
    ...     return sample_blocks(key, topology, ("b", seeds), [2])
    >>> step = sampled_step(lambda state, batch: (state, batch.x), sample, joined=True)
    >>> _, x = step(0, topology, store, jax.random.key(0), jnp.array([0]))
    >>> x.rows[:, 0], x["a"][:, 0]
    (Array([8., 2., 4.], dtype=float32), Array([2., 4.], dtype=float32))
    """

    rows: Array
    layout: SampleLayout = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> Array:
        if name not in self.layout.node_types:
            raise KeyError(name)
        number = self.layout.node_types.index(name)
        if not any(sizes[number] for sizes in self.layout.sizes):
            raise KeyError(name)
        return rows_of_type(self.layout, self.rows, self.layout.num_hops, number)

    def __iter__(self) -> Iterator[str]:
        return (name for name, count in self.layout.counts(self.layout.num_hops).items() if count)

    def __len__(self) -> int:
        return len(list(iter(self)))


def places(layout: SampleLayout) -> list[tuple[str, int, int]]:
    """The runs of rows of the joined array in order: node type, first row within the type, number of rows."""
    return [
        (name, layout.first(hop, number), layout.sizes[hop][number])
        for hop in range(layout.num_hops + 1)
        for number, name in enumerate(layout.node_types)
        if layout.sizes[hop][number]
    ]
