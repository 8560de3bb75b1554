"""The labels of a task as the loss reads them, and a model's outputs in their units."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.datasets import Task
from dejax.training.tasks.task import log_losses


class Labels:
    """The labels of a task of two classes, of several, or of amounts.

    Amounts are given to the model as differences to the mean of the training labels, in their deviations.

    Args:
        examples: the task.
        balanced: whether a class counts in inverse proportion to its training examples.

    Raises:
        ValueError: no training examples, or labels that are all equal in training.

    Attributes:
        outputs: the width of a model's result.
        weights: float32[classes], how much an example of each class counts.
        center, scale: the mean and deviation of amounts in training; 0 and 1 of classes.
    """

    def __init__(self, examples: Task, *, balanced: bool = False) -> None:
        self.examples, self.center, self.scale = examples, 0.0, 1.0
        _check(examples)
        self.outputs = (len(examples.classes) or int(examples.labels.max()) + 1) if examples.kind == "classes" else 1
        self.weights = np.ones(max(2, self.outputs), np.float32)
        train = examples.splits["train"]
        if examples.kind == "regression":
            own = examples.labels[train].astype(np.float64)  # float32 would round those that lie far from 0
            self.center, self.scale = float(own.mean()), float(own.std()) or 1.0
        elif balanced and examples.kind != "link":
            counts = np.bincount(examples.labels[train], minlength=len(self.weights))
            self.weights = (len(train) / (len(counts) * np.maximum(counts, 1))).astype(np.float32)

    @property
    def values(self) -> np.ndarray:
        """Of each example its class, int32, or its amount as a model gives it, float32."""
        labels = self.examples.labels
        if self.examples.kind == "regression":
            return ((labels.astype(np.float64) - self.center) / self.scale).astype(np.float32)
        return labels.astype(np.int32)

    def losses(self, raw: Array, wanted: Array) -> tuple[Array, Array]:
        """The loss of each example, and how much it counts: cross-entropy, or of amounts Huber's loss.

        Args:
            raw: float[examples, outputs], of a model.
            wanted: the examples' `values`.
        """
        if self.examples.kind == "regression":
            error = jnp.abs(raw[:, 0] - wanted)
            return jnp.where(error < 1.0, error**2 / 2, error - 0.5), jnp.ones(error.shape, jnp.float32)
        logits = raw if self.examples.kind == "classes" else jnp.concatenate([jnp.zeros_like(raw), raw], axis=1)
        classes = jnp.maximum(wanted, 0)
        return log_losses(logits, classes), jnp.asarray(self.weights)[classes]

    def in_units(self, raw: np.ndarray) -> np.ndarray:
        """A model's outputs as probabilities, or as amounts in the labels' unit."""
        raw = raw.astype(np.float64)
        if self.examples.kind == "regression":
            return raw[:, 0] * self.scale + self.center
        if self.examples.kind == "classes":
            odds = np.exp(raw - raw.max(-1, keepdims=True))
            return odds / odds.sum(-1, keepdims=True)
        return 1.0 / (1.0 + np.exp(-np.clip(raw[:, 0], -700, 700)))


def _check(examples: Task) -> None:
    none = np.zeros(0, np.int64)
    train, valid = examples.splits.get("train", none), examples.splits.get("valid", none)
    if not len(train):
        raise ValueError(
            f"task {examples.name!r} must have training examples, got none; move `valid_from` and `test_from`"
        )
    if examples.kind == "link":  # a label is a row
        return
    if examples.kind == "binary" and len(valid) and np.ptp(examples.labels[valid]) == 0:
        warnings.warn(
            f"task {examples.name!r} has one class among its {len(valid):,} validation examples, of which no AUROC "
            "can be computed: training does not stop early; move `valid_from` or `test_from`",
            stacklevel=5,
        )
    labels = examples.labels[train]
    if (labels == labels[0]).all():
        raise ValueError(
            f"labels of task {examples.name!r} must differ in training, got {labels[0].item()!r} in all "
            f"{len(train):,} examples; move `valid_from` and `test_from`, or choose another label"
        )
