"""Checkpoints of a run, one for each seed, by Orbax, with the settings of the run in the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dejax._optional import optional
from dejax.training.fit import Progress
from dejax.training.settings import Settings

SETTINGS_FILE = "settings.json"
_FOLDER = "checkpoints"
# Settings that a resumed run may change: the length of the run, not the model.
_FREE = ("epochs", "seeds", "eval_every")


@dataclass(slots=True)
class History:
    """The curves of one seed.

    Attributes:
        loss: loss of the training nodes before each step.
        epochs: finished steps at each evaluation.
        accuracy: by split, at each evaluation.
        seconds: time of the steps between two evaluations.
        steps: number of steps between two evaluations.
    """

    loss: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    accuracy: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, progress: Progress) -> None:
        """Appends a report, unless its epoch is there already (the first report of a resumed run)."""
        if self.epochs and progress.epoch <= self.epochs[-1]:
            return
        self.loss += [float(value) for value in progress.loss]
        self.epochs.append(progress.epoch)
        for split, value in progress.accuracy.items():
            self.accuracy.setdefault(split, []).append(value)
        if len(progress.loss):
            self.seconds.append(progress.seconds)
            self.steps.append(len(progress.loss))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class Checkpoints:
    """The checkpoints in a run's folder: `checkpoints/seed<k>/<number>` and `settings.json`.

    Args:
        folder: the folder of the run.
        kind: the class of the run's settings; it has `as_dict`.
    """

    def __init__(self, folder: Path, kind: Callable[..., Any] = Settings) -> None:
        self.folder, self.kind = folder.absolute(), kind

    def begin(self, settings: Any, *, resume: bool) -> None:
        """Prepares the folder: removes the checkpoints of an earlier run, or with `resume` checks its settings.

        Raises:
            ValueError: `resume`, and the earlier run had other settings; the message names them.
            FileNotFoundError: `resume`, and there is no earlier run.
        """
        if resume:
            former = read_settings(self.folder, self.kind).as_dict()
            changed = [
                f"{name}={value!r} (it has {former[name]!r})"
                for name, value in settings.as_dict().items()
                if name not in _FREE and value != former[name]
            ]
            if changed:
                raise ValueError(
                    f"--resume: the settings must be those of the run in {self.folder}, got {', '.join(changed)}; "
                    "give the same ones, or another --out"
                )
        elif (self.folder / SETTINGS_FILE).exists():
            shutil.rmtree(self.folder / _FOLDER, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings.as_dict(), indent=2) + "\n"
        (self.folder / SETTINGS_FILE).write_text(text, encoding="utf-8")

    def seeds(self) -> list[int]:
        """The seeds that have a checkpoint, ascending."""
        found = [p.name.removeprefix("seed") for p in (self.folder / _FOLDER).glob("seed*")]
        return sorted(int(name) for name in found if name.isdigit() and self.latest(int(name)) is not None)

    def latest(self, seed: int) -> int | None:
        """The number of a seed's checkpoint, its epoch or step; None if it has no checkpoint."""
        # Orbax writes under a temporary name and renames: a folder with a number as its name is complete.
        places = (self.folder / _FOLDER / f"seed{seed}").glob("[0-9]*")
        return max((int(place.name) for place in places if place.name.isdigit()), default=None)

    def save(self, seed: int, state: Any, history: History, number: int | None = None) -> None:
        """Writes a seed's state and curves, and replaces its earlier checkpoint.

        Args:
            seed: the seed.
            state: a pytree of arrays, of jax or numpy.
            history: the curves.
            number: finished epochs or steps; by default `state.epoch`.
        """
        with optional("orbax-checkpoint", of="a checkpoint"):
            import orbax.checkpoint as ocp

        with self._manager(seed) as manager:
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history.as_dict()))
            manager.save(int(state.epoch) if number is None else number, args=items, force=True)
            manager.wait_until_finished()

    def restore(self, seed: int, like: Any) -> tuple[Any, History]:
        """A seed's state and curves.

        Args:
            seed: the seed.
            like: a state of the same shapes and dtypes, arrays or `jax.ShapeDtypeStruct`. An array of numpy gives one
                of numpy; all others are arrays of jax.

        Raises:
            FileNotFoundError: this seed has no checkpoint.
        """
        with optional("orbax-checkpoint", of="a checkpoint"):
            import orbax.checkpoint as ocp

        epoch = self.latest(seed)
        if epoch is None:
            raise FileNotFoundError(
                f"no checkpoint of seed {seed} in {self.folder / _FOLDER}; seeds there: {self.seeds()}"
            )
        abstract = jax.tree.map(
            lambda x: x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype), like
        )
        with self._manager(seed) as manager:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), history=ocp.args.JsonRestore())
            found = manager.restore(epoch, args=items)
        return found["state"], History(**found["history"])

    def _manager(self, seed: int) -> Any:
        with optional("orbax-checkpoint", of="a checkpoint"):
            import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder / _FOLDER / f"seed{seed}", options=options)


def read_settings(folder: Path, kind: Callable[..., Any] = Settings) -> Any:
    """The settings of the run in a folder.

    Args:
        folder: the folder.
        kind: their class.

    Raises:
        FileNotFoundError: the folder has no run.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no run (no {SETTINGS_FILE}); name the folder that --out gave")
    found = json.loads(path.read_text(encoding="utf-8"))
    try:
        return kind(**found)
    except TypeError:
        raise ValueError(
            f"{folder} holds a run of another command (full batch, sampled, or link prediction); use that command"
        ) from None


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
    raise FileNotFoundError(f"{path} is not in the folder of a run; name the folder that --out gave, or a seed in it")
