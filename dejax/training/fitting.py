"""The run of one seed: epochs, curves, checkpoints, and the best state where training stops early."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dejax.datasets.files._work import Progress
from dejax.training.checkpoint import Checkpoints
from dejax.training.state import History, TrainState
from dejax.training.trainer import Trainer

SAVE_SECONDS = 30.0
"""Seconds between two checkpoints of a long run."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of training one seed with `fit`.

    Attributes:
        state: the last state; with `Settings.patience`, the state with the best validation measure.
        history: the curves of losses and measures.
        best_epoch: number of finished epochs of `state`.
    """

    state: TrainState
    history: History
    best_epoch: int


def fit(
    trainer: Trainer,
    seed: int,
    checkpoints: Checkpoints | None = None,
    *,
    resume: bool = False,
    every: int | None = None,
) -> Fitted:
    """Trains a model with one seed, with early stopping and checkpoints. Draws a progress bar if stderr is a terminal.

    Args:
        trainer: the trainer of the run.
        seed: the random seed.
        checkpoints: where states are saved; None saves none.
        resume: whether to continue from a saved state.
        every: number of steps between two checkpoints; None saves after a fixed time (`SAVE_SECONDS`).

    Returns:
        The trained state and its curves.
    """
    settings, per_epoch = trainer.settings, trainer.task.steps_per_epoch
    total, history, state = settings.epochs * per_epoch, History(), trainer.init(seed)
    best: Any = None
    if resume and checkpoints is not None and checkpoints.latest(seed) is not None:
        plain, curves = checkpoints.restore(seed, trainer.exported(state))
        state, history = trainer.imported(plain), History(**curves)
    saved, saved_at = int(state.step), time.monotonic()
    done, was_saved = saved, checkpoints is not None and checkpoints.latest(seed) == saved
    has_best = best_report(history, trainer.task.lower_is_better) is not None
    stopped = stops(history, settings.patience, trainer.task.lower_is_better)
    with Progress(f"seed {seed}", total, unit="steps") as bar:
        bar.update(done)
        for now, found in () if stopped else trainer.run(state, settings.epochs):
            state = now  # the one before is donated
            bar.update(int(state.step) - done)
            done = int(state.step)
            if found is not None:
                history.add(found, per_epoch)
                stopped = stops(history, settings.patience, trainer.task.lower_is_better)
                if settings.patience and best_report(history, trainer.task.lower_is_better) == len(history.epochs) - 1:
                    best, has_best = _kept(trainer, state, checkpoints, seed, done, history), True
            due = done - saved >= every if every else time.monotonic() - saved_at >= SAVE_SECONDS
            if checkpoints is not None and (due or done >= total or stopped):
                checkpoints.save(seed, done, trainer.exported(state), history.as_dict())
                saved, saved_at, was_saved = done, time.monotonic(), True
            if stopped:
                break
    if checkpoints is not None and not was_saved:
        checkpoints.save(seed, done, trainer.exported(state), history.as_dict())
    if settings.patience:
        # A best state may be there of an earlier run.
        if has_best and checkpoints is not None and checkpoints.latest(seed, best=True) is not None:
            best, _ = checkpoints.restore(seed, trainer.exported(trainer.init(seed)), best=True)
        state = state if best is None else trainer.imported(best)
    return Fitted(state, history, int(state.step) // per_epoch)


def best_report(history: History, lower: bool) -> int | None:
    """The place of the best validation measure among the reports, the first of equal ones; None if there is none."""
    values = np.array(history.measures.get("valid", []), np.float64)
    if not np.isfinite(values).any():
        return None
    signed = np.where(np.isfinite(values), -values if lower else values, -np.inf)
    return int(signed.argmax())


def stops(history: History, patience: int, lower: bool) -> bool:
    """Whether `patience` reports with a validation measure have followed the best one."""
    best = best_report(history, lower) if patience else None
    if best is None:
        return False
    return bool(np.isfinite(np.array(history.measures["valid"][best + 1 :], np.float64)).sum() >= patience)


def _kept(
    trainer: Trainer, state: TrainState, checkpoints: Checkpoints | None, seed: int, done: int, history: History
) -> Any:
    """The state as the best one so far: on disk, or without checkpoints a copy in memory."""
    plain = trainer.exported(state)
    if checkpoints is not None:
        checkpoints.save(seed, done, plain, history.as_dict(), best=True)
        return None
    return jax.tree.map(np.array, plain)
