"""Checkpoints of a state on a mesh, by Orbax: written by all processes, read on any number of devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax._dtypes import entering_jit
from dejax._files import writing
from dejax._optional import optional
from dejax.distributed.tables import ShardedTable
from dejax.host_gather._operands import Table
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.tables._memory import copy_rows
from dejax.host_gather.tables.table import is_table_of_host

_TABLES = "dtypes of tables"  # in the metadata of a checkpoint


def save(folder: str | os.PathLike[str], step: int, state: Any, *, keep: int = 2) -> None:
    """Writes a checkpoint of a training state. All processes call it together.

    The checkpoint becomes visible when it is complete. If a process dies during the write, the previous checkpoint
    remains the latest.

    Args:
        folder: folder for the checkpoints of this training run, on a file system that all processes see.
        step: number of the checkpoint, usually the number of finished training steps.
        state: pytree of arrays, random keys, tables in host memory, and `ShardedTable`s.
        keep: number of latest checkpoints to keep; older ones are deleted.

    Raises:
        ValueError: two leaves have one path, or a numpy integer does not fit int32 without jax's 64-bit mode.
        OSError: the drive is full. The checkpoints before are still there.
    """
    with optional("orbax-checkpoint", of="a checkpoint"):
        import orbax.checkpoint as ocp

    with writing(folder, "the checkpoints before are whole; make room on the drive"), _manager(folder, keep) as manager:
        tables = {_TABLES: _dtypes_of_tables(state)}
        manager.save(step, args=ocp.args.StandardSave(_named(state)), force=True, custom_metadata=tables)
        manager.wait_until_finished()


def restore(folder: str | os.PathLike[str], like: Any, *, step: int | None = None) -> tuple[Any, int]:
    """Reads a checkpoint into a state that lies on the current mesh. All processes call it together.

    The checkpoint may have been written with another number of devices or processes. All values are restored exactly.

    Args:
        folder: the folder that was given to `save`.
        like: a state with the structure and the placement of the result, such as the initial state of a new run. The
            rows of its tables are overwritten, so do not use `like` afterwards.
        step: number of the checkpoint to read; by default the latest.

    Returns:
        The state, and the number of its checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint and `like` differ in structure, or in the shape or dtype of an array or table.
    """
    with optional("orbax-checkpoint", of="a checkpoint"):
        import orbax.checkpoint as ocp

    found = latest_step(folder) if step is None else step
    if found is None or not (Path(folder) / str(found)).exists():
        raise FileNotFoundError(
            f"distributed.restore: `folder` must have a checkpoint{'' if found is None else f' of step {found}'}, got "
            f"{folder} without"
        )
    wanted = _named(like)
    with _manager(folder, None) as manager:
        _check_same(manager.item_metadata(found), wanted)
        saved = manager.metadata(found).custom_metadata or {}
        _check_dtypes(saved.get(_TABLES, {}), _dtypes_of_tables(like))
        abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items()}
        arrays = manager.restore(found, args=ocp.args.StandardRestore(abstract))
    return _written(like, [arrays[name] for name in wanted]), found


def latest_step(folder: str | os.PathLike[str]) -> int | None:
    """The number of the latest complete checkpoint in a folder, or None if there is none.

    >>> import tempfile
    >>> from dejax.distributed import latest_step
    >>> print(latest_step(tempfile.mkdtemp()))
    None
    """
    # Orbax writes under another name and renames: a folder with a number as its name is complete.
    names = [place.name for place in Path(folder).glob("[0-9]*")] if Path(folder).exists() else []
    return max((int(name) for name in names if name.isdigit()), default=None)


def _manager(folder: Any, keep: int | None) -> Any:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
    handler = ocp.StandardCheckpointHandler()
    return ocp.CheckpointManager(Path(folder).absolute(), options=options, item_handlers=handler)


def _named(state: Any) -> dict[str, Any]:
    """The arrays of a state by name: the unsigned integers of tables, the integers of random keys."""
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not isinstance(leaf, jax.Array):
            leaf = jnp.asarray(entering_jit("a checkpoint", leaf))
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator=".").replace("/", "_") or "state"
        if name in named:
            raise ValueError(f"the leaves of a state must have different paths, got {name!r} twice; rename a key")
        named[name] = leaf
    return named


def _check_same(metadata: Any, wanted: dict[str, Any]) -> None:
    saved = dict(getattr(metadata, "tree", metadata) or {})
    there = {name: tuple(leaf.shape) for name, leaf in saved.items()}
    if not there:
        return
    if odd := sorted(set(there) ^ set(wanted)):
        raise ValueError(
            f"distributed.restore: `like` must have the leaves of the checkpoint, got a difference in {odd[0]!r}"
        )
    for name, leaf in wanted.items():
        if there[name] != tuple(leaf.shape):
            raise ValueError(
                f"distributed.restore: `like` must have the shapes of the checkpoint, {there[name]} for {name!r}, got "
                f"{tuple(leaf.shape)}; divided tables keep their shape on 1, 2, 4 ... 64 devices"
            )
    _check_dtypes(
        {name: np.dtype(leaf.dtype).name for name, leaf in saved.items()},
        {name: leaf.dtype.name for name, leaf in wanted.items()},
    )


def _check_dtypes(saved: dict[str, str], wanted: dict[str, str]) -> None:
    """Orbax converts values of another dtype, and the words of a table would be read as other numbers."""
    for name in saved.keys() & wanted.keys():
        if saved[name] != wanted[name]:
            raise ValueError(
                f"distributed.restore: `like` must have the dtypes of the checkpoint, {saved[name]} for {name!r}, got "
                f"{wanted[name]}; restore with that dtype, and convert the result"
            )


def _dtypes_of_tables(state: Any) -> dict[str, str]:
    """The dtype of each table, whose rows are saved as unsigned integers."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda leaf: isinstance(leaf, Table))
    return {jax.tree_util.keystr(path): leaf.dtype.name for path, leaf in leaves if isinstance(leaf, Table)}


def _written(like: Any, arrays: list[Any]) -> Any:
    """The tree of `like` with restored arrays; tables keep their memory, into which the rows are copied."""
    rest = iter(arrays)

    def of_leaf(leaf: Any) -> Any:
        if is_table_of_host(leaf):
            _copy_shards(leaf._leaf, next(rest), leaf._spec.host_part)
            return leaf if leaf._hot is None else leaf._of(leaf._leaf, leaf._spec, next(rest), next(rest))
        if isinstance(leaf, ShardedTable):
            new = jax.tree.map(lambda _: next(rest), leaf)
            if leaf.spec.memory == "device":
                return new
            _copy_shards(leaf.words, new.words, leaf.spec.local)
            return jax.tree.unflatten(jax.tree.structure(leaf), [leaf.words, *jax.tree.leaves(new)[1:]])
        value = next(rest)
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
        return value

    return jax.tree.map(of_leaf, like, is_leaf=lambda leaf: is_table_of_host(leaf) or isinstance(leaf, ShardedTable))


def _copy_shards(to: Any, source: Any, spec: TableSpec) -> None:
    found = {shard.device: shard.data for shard in source.addressable_shards}
    own = to.addressable_shards
    for shard in own[:1] if spec.sharers > 1 else own:  # the devices of a process share one memory
        copy_rows(shard.data, spec, 0, np.ascontiguousarray(np.asarray(found[shard.device])))


__all__ = ["latest_step", "restore", "save"]
