"""Measures of predictions, exact, in numpy: of two classes, of several, of amounts and of ranked lists.

Each measure takes weights of rows, as scikit-learn's `sample_weight`. An interval comes from rows that are drawn with
replacement: how often a row was drawn is its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "accuracy",
    "auroc",
    "average_precision",
    "f1",
    "interval",
    "mae",
    "map_at_k",
    "measure",
    "mrr",
    "r2",
    "rmse",
]

Weights = ArrayLike | None


def auroc(labels: ArrayLike, scores: ArrayLike, weights: Weights = None) -> float:
    """The area under the ROC curve: how often a row of class 1 has a higher score than one of class 0; ties count half.

    Args:
        labels: [rows], 0 or 1.
        scores: [rows], any increasing function of the probability of class 1.
        weights: [rows], not negative; None for equal weights.

    Returns:
        A share of 1; nan where a class has no rows.

    >>> auroc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
    0.75
    """
    positive, negative, _ = _by_threshold(labels, scores, weights)
    below = np.cumsum(negative[::-1])[::-1] - negative  # weight of class 0 with lower scores
    return _ratio(float((positive * (below + negative / 2)).sum()), float(positive.sum() * negative.sum()))


def average_precision(labels: ArrayLike, scores: ArrayLike, weights: Weights = None) -> float:
    """The mean of precision over recall: sum over thresholds of (recall's increase) x precision, not interpolated.

    Arguments and result as `auroc`; nan without rows of class 1.

    >>> round(average_precision([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]), 4)
    0.8333
    """
    positive, negative, _ = _by_threshold(labels, scores, weights)
    found = np.cumsum(positive)
    total = found + np.cumsum(negative)
    precision = np.divide(found, total, out=np.zeros_like(found), where=total > 0)
    return _ratio(float((positive * precision).sum()), float(positive.sum()))


def _by_threshold(labels: ArrayLike, scores: ArrayLike, weights: Weights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights of class 1 and of class 0 at each different score, highest first, and the scores."""
    labels, scores = np.asarray(labels), np.asarray(scores)
    if labels.shape != scores.shape or labels.ndim != 1:
        raise ValueError(f"`scores` must have one score for each label, {labels.shape}, got {scores.shape}")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"`labels` must be 0 or 1, got {labels[~np.isin(labels, (0, 1))][0].item()!r}")
    if np.isnan(scores).any():
        raise ValueError(f"`scores` must be numbers, got nan in {int(np.isnan(scores).sum())} of {len(scores)} rows")
    weights = _weights(weights, len(labels))
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.int64)
    own, truth = weights[order], labels[order].astype(bool)
    if not len(starts):
        return np.zeros(0), np.zeros(0), ordered
    sums = [np.add.reduceat(np.where(side, own, 0.0), starts) for side in (truth, ~truth)]
    return sums[0], sums[1], ordered[starts]


def accuracy(labels: ArrayLike, predicted: ArrayLike, weights: Weights = None) -> float:
    """The share of rows whose predicted class is right.

    >>> accuracy([0, 1, 2, 2], [0, 1, 1, 2])
    0.75
    """
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    own = _weights(weights, len(labels))
    return _ratio(float(own[labels == predicted].sum()), float(own.sum()))


def f1(labels: ArrayLike, predicted: ArrayLike, weights: Weights = None, *, average: str = "binary") -> float:
    """2 x true positives / (2 x true positives + false positives + false negatives).

    Args:
        labels, predicted: int[rows], classes.
        weights: as `auroc`.
        average: "binary": of class 1; "macro": the mean over the classes that occur in either; "micro": of all classes
            together, which is accuracy.

    Raises:
        ValueError: an unknown average.

    >>> f1([0, 1, 1, 1], [1, 1, 1, 0])
    0.6666666666666666
    """
    if average not in ("binary", "macro", "micro"):
        raise ValueError(f"`average` must be binary, macro or micro, got {average!r}")
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    if average == "micro":
        return accuracy(labels, predicted, weights)
    own = _weights(weights, len(labels))
    classes = [1] if average == "binary" else np.union1d(labels, predicted)
    found = []
    for wanted in classes:
        both = float(own[(labels == wanted) & (predicted == wanted)].sum())
        either = float(own[labels == wanted].sum() + own[predicted == wanted].sum())
        found.append(2 * both / either if either else 0.0)
    return float(np.mean(found)) if found else float("nan")


def mae(labels: ArrayLike, predicted: ArrayLike, weights: Weights = None) -> float:
    """The mean absolute error, in the unit of the labels.

    >>> mae([1.0, 3.0], [2.0, 3.0])
    0.5
    """
    return _mean(np.abs(_errors(labels, predicted)), weights)


def rmse(labels: ArrayLike, predicted: ArrayLike, weights: Weights = None) -> float:
    """The root of the mean squared error, in the unit of the labels.

    >>> rmse([1.0, 3.0], [1.0, 5.0]) == 2**0.5
    True
    """
    return float(np.sqrt(_mean(_errors(labels, predicted) ** 2, weights)))


def r2(labels: ArrayLike, predicted: ArrayLike, weights: Weights = None) -> float:
    """The share of the labels' variance that is explained: 1 for exact predictions, 0 for their mean, or less.

    >>> r2([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), r2([1.0, 2.0, 3.0], [2.0, 2.0, 2.0])
    (1.0, 0.0)
    """
    labels = np.asarray(labels, np.float64)
    spread = (labels - _mean(labels, weights)) ** 2
    return 1.0 - _ratio(_mean(_errors(labels, predicted) ** 2, weights), _mean(spread, weights))


def _errors(labels: ArrayLike, predicted: ArrayLike) -> np.ndarray:
    labels, predicted = np.asarray(labels, np.float64), np.asarray(predicted, np.float64)
    if labels.shape != predicted.shape:
        raise ValueError(f"`predicted` must have one number for each label, {labels.shape}, got {predicted.shape}")
    return predicted - labels


def mrr(ranks: ArrayLike, weights: Weights = None) -> float:
    """The mean of 1 / rank, of ranks from 1.

    >>> mrr([1, 2, 4])
    0.5833333333333334
    """
    return _mean(1.0 / np.asarray(ranks, np.float64), weights)


def map_at_k(wanted: Sequence[ArrayLike], ranked: ArrayLike, k: int, weights: Weights = None) -> float:
    """The mean average precision of the first `k` of ranked lists.

    Of a list it is the sum of the precisions at the places of wanted items, over min(k, wanted items), as in RelBench.

    Args:
        wanted: for each entity the items that it met. Entities without any are left out.
        ranked: int[entities, at least k], the items, best first; each once.
        k: how many count.
        weights: [entities], as `auroc`.

    >>> map_at_k([[3, 5], [1]], [[3, 4, 5], [2, 1, 0]], 3)
    0.6666666666666666
    """
    ranked = np.asarray(ranked)[:, :k]
    found, there = np.zeros(len(ranked)), np.zeros(len(ranked), bool)
    for row, (items, listed) in enumerate(zip(wanted, ranked, strict=True)):
        items = np.unique(np.asarray(items))
        there[row] = len(items) > 0
        if len(items):
            hits = np.isin(listed, items)
            precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
            found[row] = precision[hits].sum() / min(k, len(items))
    return _mean(found, _weights(weights, len(found)) * there)


def measure(
    kind: str, labels: ArrayLike, predicted: ArrayLike, weights: Weights = None, *, threshold: float = 0.5
) -> dict[str, float]:
    """The measures of a task; the first is the one that training stops by.

    Args:
        kind: "binary": predictions are probabilities of class 1. "classes": probabilities [rows, classes].
            "regression": amounts.
        labels: [rows].
        predicted: [rows] or [rows, classes].
        weights: as `auroc`.
        threshold: "binary": from which probability on a row is predicted to be of class 1, for accuracy and F1.

    Raises:
        ValueError: an unknown kind.

    >>> list(measure("binary", [0, 1], [0.2, 0.9]))
    ['auroc', 'average_precision', 'accuracy', 'f1']
    """
    predicted = np.asarray(predicted)
    if kind == "binary":
        hard = (predicted >= threshold).astype(np.int64)
        return {
            "auroc": auroc(labels, predicted, weights),
            "average_precision": average_precision(labels, predicted, weights),
            "accuracy": accuracy(labels, hard, weights),
            "f1": f1(labels, hard, weights),
        }
    if kind == "classes":
        hard = predicted.argmax(-1)
        return {"accuracy": accuracy(labels, hard, weights), "f1": f1(labels, hard, weights, average="macro")}
    if kind == "regression":
        return {name: of(labels, predicted, weights) for name, of in (("mae", mae), ("rmse", rmse), ("r2", r2))}
    raise ValueError(f"`kind` must be binary, classes or regression, got {kind!r}")


LOWER_IS_BETTER = ("mae", "rmse")


def interval(
    of: Callable[[np.ndarray], Mapping[str, float]], rows: int, *, draws: int = 200, share: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bootstrap intervals of measures: percentiles over draws of rows with replacement (Efron, 1979).

    Args:
        of: the measures for given weights of rows, int64[rows].
        rows: number of rows.
        draws: how often rows are drawn.
        share: the share of the draws inside the interval.
        seed: of the draws.

    Returns:
        (low, high) by measure; draws in which a measure is nan are left out.

    >>> low, high = interval(lambda weights: {"mae": mae([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], weights)}, 3)["mae"]
    >>> 0 <= low <= high <= 1
    True
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        weights = np.bincount(rng.integers(rows, size=rows), minlength=rows)
        for name, value in of(weights).items():
            found.setdefault(name, []).append(value)
    ends = [50 * (1 - share), 50 * (1 + share)]
    return {
        name: (float("nan"), float("nan")) if np.isnan(some).all() else tuple(np.nanpercentile(some, ends).tolist())
        for name, some in found.items()
    }


def _weights(weights: Weights, rows: int) -> np.ndarray:
    if weights is None:
        return np.ones(rows)
    found = np.asarray(weights, np.float64)
    if found.shape != (rows,) or (found < 0).any():
        raise ValueError(f"`weights` must be {rows} numbers, not negative, got shape {found.shape}")
    return found


def _mean(values: np.ndarray, weights: Weights) -> float:
    own = _weights(weights, len(values))
    return _ratio(float((values * own).sum()), float(own.sum()))


def _ratio(value: float, of: float) -> float:
    return value / of if of else float("nan")
