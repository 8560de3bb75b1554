"""Checkpoints of a run by Orbax, one for each seed, and the settings of the run in the same folder.

    settings.json
    checkpoints/seed<k>/<number of finished steps>
    checkpoints/best<k>/<number of finished steps>   with early stopping: the state of the best validation measure

A checkpoint holds the arrays of a state, each under its path in the state, and a history: plain values for JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dejax._files import write_whole, writing
from dejax._optional import optional

SETTINGS_FILE = "settings.json"
_FOLDER = "checkpoints"
_FORMER = "former"  # in the folder of a seed: a checkpoint whose number is written again, until the new one is whole


class Checkpoints:
    """The checkpoints of a training run, in the folder of the run: the last and the best state of each seed.

    Args:
        folder: the folder of the run.
        free: names of settings that a resumed run may change, such as its number of epochs.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from dejax.training import Checkpoints
    >>> run = Checkpoints(tempfile.mkdtemp())
    >>> run.begin({"lr": 0.1}, resume=False)
    >>> run.save(0, 5, {"w": jnp.ones(2)}, [0.3, 0.2])
    >>> state, losses = run.restore(0, {"w": jnp.zeros(2)})
    >>> run.latest(0), float(state["w"][0]), losses
    (5, 1.0, [0.3, 0.2])
    """

    def __init__(self, folder: str | Path, free: Sequence[str] = ()) -> None:
        self.folder, self.free = Path(folder).absolute(), free

    def begin(self, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Prepares the folder: removes checkpoints of an earlier run, or with `resume` checks its settings.

        Args:
            settings: plain values by name.
            resume: whether to continue the run in the folder.

        Raises:
            ValueError: with `resume`: the earlier run had other settings, which the message names. Without `resume`:
                the folder has checkpoints of something else, which would be lost.
            FileNotFoundError: with `resume`: there is no earlier run.
        """
        settings = json.loads(json.dumps(dict(settings)))
        known = (self.folder / SETTINGS_FILE).exists()
        if resume:
            self._check_same(settings)
        elif known:
            # Moved away first: what remained after a kill could be taken for whole checkpoints.
            former = self.folder / f".{_FOLDER}-former"
            shutil.rmtree(former, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                (self.folder / _FOLDER).rename(former)
            shutil.rmtree(former, ignore_errors=True)
        elif (self.folder / _FOLDER).exists():
            raise ValueError(
                f"--out must be a new folder or that of a run, got {self.folder} with {_FOLDER} and no "
                f"{SETTINGS_FILE}; name another --out"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / SETTINGS_FILE, (json.dumps(settings, indent=2) + "\n").encode())

    def _check_same(self, settings: Mapping[str, Any]) -> None:
        former = read_settings(self.folder)
        changed = [
            f"{name}={settings.get(name)!r} (it has {former.get(name)!r})"
            for name in {**former, **settings}
            if name not in self.free and settings.get(name) != former.get(name)
        ]
        if changed:
            raise ValueError(
                f"--resume: the settings must be those of the run in {self.folder}, got {', '.join(changed)}; "
                "give the same ones, or another --out"
            )

    def seeds(self) -> list[int]:
        """The seeds that have a checkpoint, ascending."""
        found = [p.name.removeprefix("seed") for p in (self.folder / _FOLDER).glob("seed*")]
        return sorted(int(name) for name in found if name.isdigit() and self.latest(int(name)) is not None)

    def latest(self, seed: int, *, best: bool = False) -> int | None:
        """The number of finished steps of a seed's last checkpoint (with `best`, its best), or None without one."""
        place = self._place(seed, best)
        return max(_numbers(place) | _numbers(place / _FORMER), default=None)

    def _place(self, seed: int, best: bool) -> Path:
        return self.folder / _FOLDER / f"{'best' if best else 'seed'}{seed}"

    def save(self, seed: int, number: int, state: Any, history: Any, *, best: bool = False) -> None:
        """Writes the state and history of a seed, in place of its earlier checkpoint, which stays until that is done.

        Args:
            seed: the seed.
            number: number of finished steps.
            state: pytree of jax or numpy arrays.
            history: plain values that JSON can hold.
            best: whether this is the best state so far, which is kept beside the last one.

        Raises:
            OSError: the drive is full. The earlier checkpoint is still there.
        """
        args, place = _orbax().args, self._place(seed, best)
        items = args.Composite(state=args.StandardSave(_by_path(state)), history=args.JsonSave(history))
        if number in _numbers(place):  # of a run that ended before it wrote its last state, and was resumed
            shutil.rmtree(place / _FORMER, ignore_errors=True)
            (place / _FORMER).mkdir()
            (place / str(number)).rename(place / _FORMER / str(number))
        with writing(place, "the checkpoint before is whole; make room on the drive"), _manager(place) as manager:
            manager.save(number, args=items, force=True)
            manager.wait_until_finished()
        shutil.rmtree(place / _FORMER, ignore_errors=True)

    def restore(self, seed: int, like: Any, *, best: bool = False) -> tuple[Any, Any]:
        """Reads the state and history of a seed.

        Args:
            seed: the seed.
            like: pytree of arrays or `jax.ShapeDtypeStruct` with the shapes and dtypes of the state. Where it has a
                numpy array, the result has one; all other results are jax arrays with the placement of the leaf.
            best: whether to read the best state instead of the last one.

        Returns:
            A pair (state, history).

        Raises:
            FileNotFoundError: the seed has no checkpoint.
        """
        number = self.latest(seed, best=best)
        if number is None:
            raise FileNotFoundError(
                f"the seed must have a checkpoint in {self.folder / _FOLDER}, got {seed}; seeds there: {self.seeds()}"
            )
        args, place = _orbax().args, self._place(seed, best)
        with _manager(place if number in _numbers(place) else place / _FORMER) as manager:
            abstract = {name: _abstract(leaf) for name, leaf in _by_path(like).items()}
            items = args.Composite(state=args.StandardRestore(abstract), history=args.JsonRestore())
            found = manager.restore(number, args=items)
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        leaves = [_placed(found["state"][_name(path)], leaf) if leaf.size else leaf for path, leaf in paths]
        return jax.tree.unflatten(structure, leaves), found["history"]


def _numbers(place: Path) -> set[int]:
    """The numbers of the checkpoints in a folder."""
    # Orbax writes under a temporary name and renames: a folder with a number as its name is complete.
    return {int(found.name) for found in place.glob("[0-9]*") if found.name.isdigit()}


def _manager(place: Path) -> Any:
    ocp = _orbax()
    options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True, enable_async_checkpointing=False)
    return ocp.CheckpointManager(place, options=options)


def _orbax() -> Any:
    with optional("orbax-checkpoint", of="a checkpoint"):
        import orbax.checkpoint
    return orbax.checkpoint


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _by_path(state: Any) -> dict[str, Any]:
    """The leaves of a state, each under its path, without empty ones, which Orbax refuses."""
    leaves = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state) if leaf.size]
    found = dict(leaves)
    if len(found) < len(leaves):
        twice = next(name for name, _ in leaves if sum(name == other for other, _ in leaves) > 1)
        raise ValueError(
            f"the leaves of a state must have different paths, got {twice!r} twice; leave dots out of keys"
        )
    return found


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:  # Orbax reads into the memory of the device; `_placed` moves what lies elsewhere
        sharding = sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(value: Any, leaf: Any) -> Any:
    sharding = None if isinstance(leaf, np.ndarray) else getattr(leaf, "sharding", None)
    return value if sharding is None else jax.device_put(value, sharding)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the run in a folder.

    Raises:
        FileNotFoundError: the folder has no run.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} must be the folder of a run, with {SETTINGS_FILE}, got none; give the folder that --out gave"
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps other processes from training into the folder of a run, by a lock that the kernel ends with the process.

    A folder that does not exist is made, and removed if nothing was written into it.

    Raises:
        ValueError: another process trains into the folder, or a file has its name.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out must be a folder, got {folder}, which is a file; name another --out")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock, folder)
        yield
    finally:
        os.close(lock)
        if made:
            with contextlib.suppress(OSError):  # it has files
                folder.rmdir()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"--out must be a folder into which no other process trains, got {folder}; name another --out, or wait for "
            "that process"
        ) from error
    except OSError:
        return  # a file system without locks


def find_run(path: Path) -> tuple[Path, int | None]:
    """The folder of the run that contains a path, and the seed in the path, if there is one.

    Args:
        path: a run's folder, or anything inside it, such as `checkpoints/seed3` or `checkpoints/seed3/50`.

    Raises:
        FileNotFoundError: the path is in no run.
    """
    path = path.absolute()
    seed = None
    for place in (path, *path.parents):
        if (place / SETTINGS_FILE).exists():
            return place, seed
        if place.parent.name == _FOLDER and place.name.removeprefix("seed").isdigit():
            seed = int(place.name.removeprefix("seed"))
    raise FileNotFoundError(f"--evaluate must be the folder that --out gave, or a seed in it, got {path}")
