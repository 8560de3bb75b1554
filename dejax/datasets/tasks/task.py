"""`Task`: what to predict of which rows of a table, as of which times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

TaskKind = Literal["binary", "classes", "regression", "link"]
TASK_KINDS: tuple[str, ...] = get_args(TaskKind)


@dataclass(frozen=True, eq=False)
class Task:
    """A prediction task on tables: examples that are rows of a table at a cutoff time, with labels and splits.

    The label of an example must be predicted from what was known by its cutoff.

    Attributes:
        name: name of the task.
        kind: "binary" (labels 0 and 1), "classes" (labels from 0 on), "regression", or "link" (which rows of `target`
            the entity will be linked to).
        entity: the table whose rows the labels belong to.
        rows: int32[m], for each example its row of the entity table; a row may occur at several times.
        times: int64[m], the cutoff of each example, in the unit of the data set's times.
        labels: int32[m] for "binary" and "classes", float64[m] for "regression". For "link" int32[total], rows of
            `target`; example i has those from `offsets[i]` to `offsets[i + 1]`.
        splits: for each of "train", "valid" and "test" the numbers of its examples, int[]. The splits follow one
            another in time.
        offsets: for "link": int64[m + 1]. Otherwise None.
        target: for "link": the table that links lead to. Otherwise None.
        classes: names of the classes, or of the labels 0 and 1.
        unit: unit of the labels of a regression, such as "minutes".
        hidden: (table, column) pairs that are never an input, such as the column of the labels.
        left_out: reasons why examples were left out, such as entities that are not known by their cutoff, with counts.

    >>> rows, times, splits = np.array([0, 2]), np.array([10, 20]), {"train": np.array([0]), "test": np.array([1])}
    >>> print(Task("late", "binary", "flights", rows, times, np.array([0, 1]), splits).summary())
    task late: binary of flights, 2 examples
                  1  train, 0.0 % positive
                  1  test, 100.0 % positive
    """

    name: str
    kind: TaskKind
    entity: str
    rows: np.ndarray
    times: np.ndarray
    labels: np.ndarray
    splits: Mapping[str, np.ndarray]
    offsets: np.ndarray | None = None
    target: str | None = None
    classes: tuple[str, ...] = ()
    unit: str = ""
    hidden: tuple[tuple[str, str], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in TASK_KINDS:
            raise ValueError(f"kind of task {self.name!r} must be one of {', '.join(TASK_KINDS)}, got {self.kind!r}")
        is_link = self.kind == "link"
        if is_link != (self.offsets is not None) or is_link != (self.target is not None):
            raise ValueError(
                "offsets and target must be given for tasks of the kind 'link', and for no other kind, got the kind "
                f"{self.kind!r} for task {self.name!r}"
            )
        labels = len(self.labels) if self.offsets is None else len(self.offsets) - 1
        if not len(self.rows) == len(self.times) == labels:
            raise ValueError(
                f"rows, times and labels of task {self.name!r} must have one length, got {len(self.rows)}, "
                f"{len(self.times)} and {labels}"
            )
        for split, places in self.splits.items():
            if split not in ("train", "valid", "test"):
                raise ValueError(f"splits of task {self.name!r} must be train, valid and test, got {split!r}")
            if len(places) and not 0 <= places.min() <= places.max() < len(self.rows):
                raise ValueError(
                    f"the split {split!r} of task {self.name!r} must have places from 0 to {len(self.rows) - 1}, got "
                    f"{places.min()} to {places.max()}"
                )

    def __len__(self) -> int:
        return len(self.rows)

    def summary(self) -> str:
        """A text table of the kind, the splits with their labels, and what was left out."""
        what = f"{self.kind} of {self.entity}" + (f" to {self.target}" if self.target else "")
        lines = [f"task {self.name}: {what}, {len(self):,} examples" + (f", in {self.unit}" if self.unit else "")]
        for split, places in self.splits.items():
            lines.append(f"{len(places):>15,}  {split}{self._shown(places)}")
        lines += [f"{count:>15,}  left out: {why}" for why, count in self.left_out.items() if count]
        return "\n".join(lines)

    def _shown(self, places: np.ndarray) -> str:
        if not len(places):
            return ""
        if self.offsets is not None:
            return f", {np.diff(self.offsets)[places].mean():.2f} links each"
        labels = self.labels[places]
        if self.kind == "regression":
            return f", mean {labels.mean():.4g}, deviation {labels.std():.4g}"
        shares = np.bincount(labels, minlength=max(2, len(self.classes))) / len(places)
        if self.kind == "binary":
            what = "positive" if self.classes in ((), ("0", "1")) else self.classes[-1]
            return f", {100 * shares[1]:.1f} % {what}"
        return f", {len(np.flatnonzero(shares))} classes"

    def with_kept(self, kept: np.ndarray, why: str) -> Task:
        """The task with the examples where `kept`, bool[m], is True.

        `left_out` counts the others under the reason `why`.
        """
        if kept.all():
            return self
        place = np.cumsum(kept) - 1
        splits = {split: place[own[kept[own]]] for split, own in self.splits.items()}
        labels, offsets = self.labels, self.offsets
        if offsets is None:
            labels = labels[kept]
        else:
            lengths = np.diff(offsets)
            labels = labels[np.repeat(kept, lengths)]
            offsets = np.concatenate([[0], np.cumsum(lengths[kept])])
        return dataclasses.replace(
            self,
            rows=self.rows[kept],
            times=self.times[kept],
            labels=labels,
            offsets=offsets,
            splits=splits,
            left_out={**self.left_out, why: self.left_out.get(why, 0) + int((~kept).sum())},
        )
