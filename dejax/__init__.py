"""Data-efficient deep learning on GPUs in JAX.

* `dejax.rgnn`: a compiler for relational graph neural networks.
* `dejax.segment`: segment sums, maxima, softmaxes: `jax.ops.segment_*` and `jraph.segment_*`, fast on GPUs.
* `dejax.pallas`: the kernel templates beneath it, on plain arrays.
* `dejax.datasets`: graphs to train on; `dejax.training`: the loop of the entity classification example.
* `dejax.host_gather`: tables in host memory that compiled steps read and write in place.
* `dejax.minibatch`: sampled mini-batches of heterogeneous graphs.
* `dejax.offload`: activations and optimizer state on host memory and NVMe.
* `python -m dejax.info`: what this machine and this installation have.

Each is imported when it is first used: `import dejax` alone loads nothing else.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["__version__", "datasets", "host_gather", "minibatch", "offload", "pallas", "rgnn", "segment", "training"]

if TYPE_CHECKING:
    from dejax import datasets, host_gather, minibatch, offload, pallas, rgnn, segment, training

_SUBPACKAGES = frozenset(__all__) - {"__version__"}


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"dejax.{name}")
    raise AttributeError(f"module 'dejax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
