"""Mini-batches of heterogeneous graphs: what composes tables in host memory, relational layers and offloading.

* `HeteroTopology` holds the edges by relation, in host memory, on the device or in a folder.

docs/minibatch.md is the guide.
"""

from dejax.minibatch.topology import HeteroTopology

__all__ = [
    "HeteroTopology",
]
