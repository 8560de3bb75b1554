"""Measures of predictions, exact, in numpy: of two classes, of several, of amounts and of ranked lists.

Each measure takes weights of rows, as scikit-learn's `sample_weight`. An interval comes from rows that are drawn with
replacement: how often a row was drawn is its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "Ranking",
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
    "recall_at_k",
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
    order = np.argsort(scores, kind="stable")[::-1]  # integers without a sign have no negatives
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
        average: "binary": of class 1; "macro": the mean over the classes that occur in either, in rows of a weight
            above 0; "micro": of all classes together, which is accuracy.

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
    # A class that no row of a bootstrap draw has is not one of which all rows are wrong.
    classes = [1] if average == "binary" else np.union1d(labels[own > 0], predicted[own > 0])
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
    hits, counts = _hits(wanted, ranked, k)
    return _mean(_average_precisions(hits, counts, k), _weights(weights, len(hits)) * (counts > 0))


def recall_at_k(wanted: Sequence[ArrayLike], ranked: ArrayLike, k: int, weights: Weights = None) -> float:
    """The mean share of an entity's items that are among the first `k` of its ranked list; arguments as `map_at_k`.

    >>> recall_at_k([[3, 5], [1]], [[3, 4, 0], [2, 1, 0]], 3)
    0.75
    """
    hits, counts = _hits(wanted, ranked, k)
    return _mean(hits.sum(1) / np.maximum(counts, 1), _weights(weights, len(hits)) * (counts > 0))


def _hits(wanted: Sequence[ArrayLike], ranked: ArrayLike, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of the first `k` items of each list are wanted, bool[entities, k]; and how many different ones are."""
    ranked = np.asarray(ranked)[:, :k]
    different = [np.unique(np.asarray(items)) for items in wanted]
    found = [np.isin(listed, items) for items, listed in zip(different, ranked, strict=True)]
    return np.array(found, bool).reshape(ranked.shape), np.array([len(items) for items in different], np.int64)


def _average_precisions(hits: np.ndarray, counts: np.ndarray, k: int) -> np.ndarray:
    precision = np.cumsum(hits, axis=1) / np.arange(1, hits.shape[1] + 1)
    return (precision * hits).sum(1) / np.minimum(k, np.maximum(counts, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """The best k candidates of each example of a link task, and the rank of its true links among all candidates.

    Attributes:
        rows: int32[examples, k], the best candidates as rows of the target table; -1 if there are fewer than k.
        scores: float32[examples, k], the score of each of these candidates.
        hits: bool[examples, k], whether each of these candidates is a true link of the example.
        first: float64[examples], the rank of the example's best true link, from 1; candidates of equal score
            share the mean of their ranks. Infinite if no true link is a candidate.
    """

    rows: np.ndarray
    scores: np.ndarray
    hits: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def joined(cls, parts: Sequence[Ranking]) -> Ranking:
        """Joins the examples of several rankings, one after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))


def measure(
    kind: str, labels: ArrayLike, predicted: ArrayLike | Ranking, weights: Weights = None, *, threshold: float = 0.5
) -> dict[str, float]:
    """The measures of a task; the first is the one that training stops by.

    Args:
        kind: "binary": predictions are probabilities of class 1. "classes": probabilities [rows, classes].
            "regression": amounts. "link": a `Ranking`; examples without links are left out.
        labels: [rows]; of links the number that each example has.
        predicted: [rows] or [rows, classes], or a `Ranking`.
        weights: as `auroc`.
        threshold: "binary": from which probability on a row is predicted to be of class 1, for accuracy and F1.

    Raises:
        ValueError: an unknown kind.

    >>> list(measure("binary", [0, 1], [0.2, 0.9]))
    ['auroc', 'average_precision', 'accuracy', 'f1']
    """
    if isinstance(predicted, Ranking):
        return _of_links(np.asarray(labels), predicted, weights)
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
    raise ValueError(f"`kind` must be binary, classes, regression or (with a Ranking) link, got {kind!r}")


def _of_links(counts: np.ndarray, found: Ranking, weights: Weights) -> dict[str, float]:
    k = found.rows.shape[1]
    own = _weights(weights, len(found)) * (counts > 0)
    return {
        f"map@{k}": _mean(_average_precisions(found.hits, counts, k), own),
        "mrr": mrr(found.first, own),
        f"recall@{k}": _mean(found.hits.sum(1) / np.maximum(counts, 1), own),
    }


LOWER_IS_BETTER = ("mae", "rmse")


def is_better(name: str, value: float, other: float) -> bool:
    """Whether one value of a measure is better than another."""
    return value < other if name in LOWER_IS_BETTER else value > other


def interval(
    of: Callable[[np.ndarray], Mapping[str, float]], rows: int, *, draws: int = 200, share: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bootstrap intervals of measures: percentiles over draws of rows with replacement (Efron, 1979).

    Args:
        of: the measures for given weights of rows, int64[rows].
        rows: number of rows.
        draws: how often rows are drawn.
        share: the share of the draws inside the interval.
        seed: the seed of the draws.

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
