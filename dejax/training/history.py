"""The curves of one seed of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dejax.training.fit import Progress


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
