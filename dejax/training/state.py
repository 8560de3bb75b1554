"""The state of a run, what a trainer reports, and the curves of one seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jax import Array

from dejax._pytrees import pytree
from dejax.minibatch import FeatureStore


@pytree
@dataclass(frozen=True, slots=True)
class TrainState:
    """The state of a training run, which each step changes and from which a run can be resumed.

    Attributes:
        params: the parameters of the model, an nnx.State.
        opt_state: the state of Adam, for all parameters as one vector.
        embeddings: the trainable embeddings of node types, tables in host memory.
        moments: Adam's state of each embedding, tables in host memory.
        step: int32 scalar, number of finished steps.
        seed: uint32 scalar, the seed of the run.
        key: uint32 [2], the run's random key as plain integers. Step s draws from `fold_in(key, s)`, so that a resumed
            run draws the same numbers.
        sums: sums over the steps of the epoch: "loss" (times the number of seeds), "weight" (the number of seeds), and
            counts of the task.
        lost: int32 scalar, number of sampled nodes and edges that exceeded the capacities, in all steps.
        skipped: int32 scalar, number of steps that changed no parameter because loss or gradients were not finite.

    >>> from dejax.datasets import load
    >>> from dejax.training import Trainer, resolve
    >>> trainer = Trainer(resolve("stdlib"), load("stdlib"))  # doctest: +SKIP
    >>> state = trainer.init(seed=0)  # doctest: +SKIP
    >>> int(state.step)  # doctest: +SKIP
    """

    params: Any
    opt_state: Any
    embeddings: FeatureStore
    moments: Any
    step: Array
    seed: Array
    key: Array
    sums: dict[str, Array]
    lost: Array
    skipped: Array


@dataclass(frozen=True, slots=True)
class Epochs:
    """What `Trainer.run` reports after some epochs.

    Attributes:
        epoch: number of finished epochs.
        loss: the mean loss of each epoch since the last report.
        measures: after the last step, by split; nan where a measure was not due.
        seconds: time of the steps since the last report, without compilation and evaluation.
    """

    epoch: int
    loss: list[float]
    measures: dict[str, float]
    seconds: float


@dataclass(slots=True)
class History:
    """The curves of one seed.

    Attributes:
        loss: mean loss of each epoch; where an epoch is one step, the loss before that step.
        epochs: finished epochs at each report.
        measures: for each split the measures at each report.
        seconds: time of the steps between two reports.
        steps: number of steps between two reports.
    """

    loss: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    measures: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, found: Epochs, steps_per_epoch: int) -> None:
        """Appends a report."""
        self.loss += found.loss
        self.epochs.append(found.epoch)
        for split, value in found.measures.items():
            self.measures.setdefault(split, []).append(value)
        self.seconds.append(found.seconds)
        self.steps.append(len(found.loss) * steps_per_epoch)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}
