"""Tables in host memory that compiled steps read and write in place.

* `HostTable` holds the rows; `CachedTable` also keeps the most used rows on the device. `SplitTable` keeps some rows on
  the device instead, `DeviceTable` all; `PeerTable` divides some over the memory of several devices.
* `gather` reads rows by ids inside `jax.jit`, without a copy of the table on the device and without a host callback.
* `scatter`, `scatter_add`, and the optimizers `sgd`, `adagrad` and `adam` write rows in place.
* `gather_start`, `gather_done` and `prefetched_scan` overlap reads with compute.

docs/host_gather.md is the guide, docs/performance/host_gather.md has the measurements.
"""

from dejax.host_gather.gather import check_errors, gather
from dejax.host_gather.gradient import RowGradient, value_and_grad
from dejax.host_gather.pipeline import PendingRows, gather_done, gather_start, prefetched_scan
from dejax.host_gather.tables._lifetime import TableClosedError
from dejax.host_gather.tables.cached import CachedTable, count_ids
from dejax.host_gather.tables.drive import DriveTable
from dejax.host_gather.tables.host import HostTable
from dejax.host_gather.tables.peers import PeerTable
from dejax.host_gather.tables.placed import DeviceTable, SplitTable
from dejax.host_gather.tables.table import shardings
from dejax.host_gather.update import Optimizer, OptimizerState, adagrad, adam, scatter, scatter_add, sgd

__all__ = [
    "CachedTable",
    "DeviceTable",
    "DriveTable",
    "HostTable",
    "Optimizer",
    "OptimizerState",
    "PeerTable",
    "PendingRows",
    "RowGradient",
    "SplitTable",
    "TableClosedError",
    "adagrad",
    "adam",
    "check_errors",
    "count_ids",
    "gather",
    "gather_done",
    "gather_start",
    "prefetched_scan",
    "scatter",
    "scatter_add",
    "sgd",
    "shardings",
    "value_and_grad",
]
