"""Data-efficient deep learning on GPUs in JAX.

* `dejax.rgnn`: a compiler for relational graph neural networks, with a zoo of published layers.
* `dejax.host_gather`: tables in host memory that compiled steps read and write in place.
* `dejax.offload`: activations in host memory and on NVMe, parameters and optimizer state in host memory.
* `dejax.minibatch`: mini-batches of heterogeneous graphs, on `rgnn` and `host_gather`.
* `dejax.segment`: segment sums, maxima and softmaxes for any JAX code, fast on GPUs.
* `dejax.pallas`: the kernel templates beneath `rgnn` and `segment`, on plain arrays.
* `dejax.datasets`: graphs to train on.
* `dejax.report(step, *args)`: a page about a jitted step: memory by owner, kernels by time, and what to try next.
* `dejax.training`: the command `dejax-train`, which trains on relational graphs.
* `python -m dejax.info`: what this machine and this installation have.

Each is imported when it is first used: `import dejax` alone loads nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "datasets",
    "host_gather",
    "minibatch",
    "offload",
    "pallas",
    "report",
    "reporting",
    "rgnn",
    "segment",
    "training",
]

if TYPE_CHECKING:
    from dejax import datasets, host_gather, minibatch, offload, pallas, reporting, rgnn, segment, training
    from dejax.reporting import report

_SUBPACKAGES = frozenset(__all__) - {"__version__", "report"}


def __getattr__(name: str) -> Any:
    if name == "report":
        return importlib.import_module("dejax.reporting").report
    if name in _SUBPACKAGES:
        return importlib.import_module(f"dejax.{name}")
    raise AttributeError(f"module 'dejax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
