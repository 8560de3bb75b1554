"""What a model reads of the rows that it is asked about, besides their samples: history, and a linear model's outputs.

Both are computed before the first step, for all examples of a task, and later for those of new cutoffs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.datasets import HeteroDataset, Task
from dejax.datasets.files._work import for_blocks
from dejax.minibatch import HeteroTopology
from dejax.training.tables.history import HistoryReader, RowHistory
from dejax.training.tables.labels import Labels
from dejax.training.tables.linear import LinearModel
from dejax.training.tables.prepared import PreparedTables
from dejax.training.tables.seed_times import Clock

MOST_FITTED = 50_000
"""Training examples to which histories and linear models are fitted: a hundred coefficients have no errors to speak of
then, and the fit takes a second."""
_BLOCK = 1 << 14  # examples of a thread


@dataclass(frozen=True, slots=True, eq=False)
class ExampleInputs:
    """The inputs of some examples.

    Attributes:
        history: float32[examples, width], packed rows of the history's plan.
        offsets: float32[examples, outputs], the linear model's outputs, from which a network starts.
    """

    history: np.ndarray
    offsets: np.ndarray

    def of(self, places: np.ndarray) -> ExampleInputs:
        """Those of examples by their places int[...]; any for -1."""
        return ExampleInputs(self.history[places], self.offsets[places])


def as_bits(values: np.ndarray) -> np.ndarray:
    """float32[...] as int32[...]: what goes with the seeds of pipelined steps is integers."""
    return np.ascontiguousarray(values, np.float32).view(np.int32)


def of_bits(bits: Array) -> Array:
    """The float32[...] of `as_bits`, in a step; NaN in steps without seeds."""
    found: Array = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return found


def some_of(places: np.ndarray) -> np.ndarray:
    """At most `MOST_FITTED` of some training examples, from all of their order."""
    return places[:: max(1, -(-len(places) // MOST_FITTED))]


class SeedInputs:
    """Computes the inputs of examples of a task, and is fitted to its training examples.

    Args:
        data: tables as a graph.
        prepared: its packed columns and edges.
        clock: counts the times.
        examples: the task, of labels that are no links.
        labels: its labels.
        bins: quantiles of the history's numbers.

    Attributes:
        history: the history of the entity's rows.
        linear: the linear model of the row and its history.
        own: the inputs of the task's examples.
    """

    def __init__(
        self, data: HeteroDataset, prepared: PreparedTables, clock: Clock, examples: Task, labels: Labels, bins: int
    ) -> None:
        self._clock, self._plans = clock, prepared.plans
        history = RowHistory.of(data, prepared.topology, examples.entity, prepared.plans)
        reader = HistoryReader(history, data, prepared.topology, prepared.plans)
        some = some_of(examples.splits["train"])
        numbers = reader(examples.rows[some], clock.cutoffs(examples.times[some]))
        self.history = history.fitted(numbers, bins, examples.times[some])
        numbers = numbers[:, list(self.history.kept)]
        plan = prepared.plans[examples.entity]
        self.linear, crossed = LinearModel.fitted(
            data, examples, plan, some, numbers, labels.values[some], labels.weights_of(some)
        )
        self.own = self._inputs(data, reader, examples, np.arange(len(examples)))
        if crossed is not None:
            self.own.offsets[some] = crossed * float(os.environ.get("LIN_START", "1"))

    def of(self, data: HeteroDataset, topology: HeteroTopology, examples: Task, places: np.ndarray) -> ExampleInputs:
        """The inputs of examples of any cutoffs, int[n] their places, from tables and edges."""
        return self._inputs(data, HistoryReader(self.history, data, topology, self._plans), examples, places)

    def _inputs(
        self, data: HeteroDataset, read: Callable[..., np.ndarray], examples: Task, places: np.ndarray
    ) -> ExampleInputs:
        history = np.empty((len(places), len(self.history.kept)), np.float32)
        offsets = np.empty((len(places), self.linear.outputs), np.float32)

        def work(_: int, start: int, stop: int) -> None:
            rows, times = examples.rows[places[start:stop]], examples.times[places[start:stop]]
            numbers = read(rows, self._clock.cutoffs(times))
            history[start:stop] = self.history.packed(numbers)
            offsets[start:stop] = self.linear(data, rows, times, numbers[:, list(self.history.kept)]) * float(os.environ.get("LIN_START", "1"))

        for_blocks(work, len(places), _BLOCK, progress=False)
        return ExampleInputs(history, offsets)
