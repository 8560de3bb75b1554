"""Several GPUs and hosts: the same step on a mesh, on jax's own runtime. Nothing here starts processes.

* `data_parallel` turns the two halves of a step for one device into a step over a mesh.
* `over_mesh` turns a layer for one device into a full-graph layer over a mesh; `dejax.distributed.partition` splits
  graphs.
* `share` puts tables, stores and topologies on all devices of a mesh, for reading or writing.
* `ShardedTable` is a table whose rows are divided over the memory of devices or hosts.
* `initialize`, `watch` and `check_agreement` end a job with a message if a process dies or has different data.
* `save` and `restore` write and read checkpoints, also with different numbers of devices.

docs/distributed.md and docs/full_graph_mesh.md are the guides.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and the reference; the names are loaded when they are used
    from dejax.distributed._placing import local, make_mesh, replicate, share
    from dejax.distributed.checkpoint import latest_step, restore, save
    from dejax.distributed.failing import EXIT_STATUS, DisagreementError, check_agreement, initialize, watch
    from dejax.distributed.full_graph import MeshProgram, ShardedGraph, over_mesh
    from dejax.distributed.links import link_bytes
    from dejax.distributed.optimizer_state import divided
    from dejax.distributed.parallel_step import Part, StepReport, data_parallel
    from dejax.distributed.tables import ShardedTable, check_lost

_PLACES = {
    "DisagreementError": "failing",
    "EXIT_STATUS": "failing",
    "MeshProgram": "full_graph",
    "Part": "parallel_step",
    "StepReport": "parallel_step",
    "data_parallel": "parallel_step",
    "divided": "optimizer_state",
    "latest_step": "checkpoint",
    "link_bytes": "links",
    "local": "_placing",
    "make_mesh": "_placing",
    "restore": "checkpoint",
    "save": "checkpoint",
    "replicate": "_placing",
    "ShardedGraph": "full_graph",
    "ShardedTable": "tables",
    "check_agreement": "failing",
    "check_lost": "tables",
    "initialize": "failing",
    "over_mesh": "full_graph",
    "watch": "failing",
    "share": "_placing",
}

__all__ = [
    "DisagreementError",
    "EXIT_STATUS",
    "MeshProgram",
    "Part",
    "StepReport",
    "ShardedGraph",
    "ShardedTable",
    "check_agreement",
    "check_lost",
    "data_parallel",
    "divided",
    "initialize",
    "latest_step",
    "link_bytes",
    "local",
    "make_mesh",
    "over_mesh",
    "replicate",
    "restore",
    "save",
    "share",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"dejax.distributed.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'dejax.distributed' has no attribute {name!r}; it has {', '.join(__all__)}")
