"""Measures of predictions: by their definitions, with ties and weights, and as scikit-learn computes them."""

import numpy as np
import pytest

from dejax.training import metrics

RNG = np.random.default_rng(0)


def drawn(rows, distinct):
    labels = RNG.integers(0, 2, rows)
    scores = RNG.integers(0, distinct, rows) / distinct
    return labels, scores, RNG.integers(0, 4, rows).astype(float)


@pytest.mark.parametrize("distinct", [3, 10**6])
def test_auroc_is_the_share_of_pairs_in_order_and_weights_are_repeated_rows(distinct):
    labels, scores, weights = drawn(200, distinct)
    pairs = (labels == 1)[:, None] & (labels == 0)[None]
    order = np.where(scores[:, None] > scores[None], 1.0, np.where(scores[:, None] == scores[None], 0.5, 0.0))
    assert metrics.auroc(labels, scores) == pytest.approx(order[pairs].mean(), abs=1e-12)
    again = np.repeat(np.arange(200), weights.astype(int))
    for measure in (metrics.auroc, metrics.average_precision, metrics.mae, metrics.rmse, metrics.r2):
        assert measure(labels, scores, weights) == pytest.approx(measure(labels[again], scores[again]), abs=1e-12)
    hard = scores > 0.5
    for measure in (metrics.accuracy, metrics.f1):
        assert measure(labels, hard, weights) == pytest.approx(measure(labels[again], hard[again]), abs=1e-12)


def test_average_precision_adds_precision_where_recall_rises():
    labels, scores, _ = drawn(100, 7)
    found = 0.0
    for threshold in np.unique(scores):
        above, there = scores >= threshold, scores == threshold
        found += labels[there].sum() / labels.sum() * labels[above].mean()
    assert metrics.average_precision(labels, scores) == pytest.approx(found, abs=1e-12)


def test_measures_are_those_of_scikit_learn():
    learn = pytest.importorskip("sklearn.metrics")
    for rows, distinct in ((50, 4), (3000, 10**9)):
        labels, scores, weights = drawn(rows, distinct)
        classes, guesses = RNG.integers(0, 5, rows), RNG.integers(0, 5, rows)
        for sample in (None, weights):
            own = {"sample_weight": sample}
            found = [
                (metrics.auroc(labels, scores, sample), learn.roc_auc_score(labels, scores, **own)),
                (
                    metrics.average_precision(labels, scores, sample),
                    learn.average_precision_score(labels, scores, **own),
                ),
                (metrics.f1(labels, scores > 0.5, sample), learn.f1_score(labels, scores > 0.5, **own)),
                (metrics.r2(labels, scores, sample), learn.r2_score(labels, scores, **own)),
                (metrics.mae(labels, scores, sample), learn.mean_absolute_error(labels, scores, **own)),
                (metrics.rmse(labels, scores, sample) ** 2, learn.mean_squared_error(labels, scores, **own)),
            ]
            for average in ("macro", "micro"):
                ours = metrics.f1(classes, guesses, sample, average=average)
                found.append((ours, learn.f1_score(classes, guesses, average=average, **own)))
            for ours, theirs in found:
                assert ours == pytest.approx(theirs, abs=1e-9)


def test_ranked_lists():
    assert metrics.map_at_k([[1, 2, 3], [9], []], [[1, 5, 2], [7, 8, 6], [0, 1, 2]], 3) == pytest.approx(
        ((1 + 2 / 3) / 3 + 0) / 2  # an entity that met nothing has no say
    )
    assert metrics.map_at_k([[4]], [[3, 4, 5]], 1) == 0.0
    assert metrics.mrr([1, 10]) == pytest.approx(0.55)


def test_an_interval_holds_the_measure_and_narrows_with_rows():
    widths = []
    for rows in (50, 5000):
        labels = RNG.integers(0, 2, rows)
        scores = labels + RNG.normal(size=rows)

        def measures(weights, labels=labels, scores=scores):
            return metrics.measure("binary", labels, scores, weights)

        found = metrics.interval(measures, rows, draws=50)
        low, high = found["auroc"]
        assert low < metrics.auroc(labels, scores) < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 4


def test_a_class_without_rows_has_no_auroc_and_mistakes_are_named():
    assert np.isnan(metrics.auroc([1, 1], [0.1, 0.2])) and np.isnan(metrics.average_precision([0, 0], [0.1, 0.2]))
    assert np.isnan(metrics.mae([], []))
    with pytest.raises(ValueError, match="`labels` must be 0 or 1, got 2"):
        metrics.auroc([0, 2], [0.1, 0.2])
    with pytest.raises(ValueError, match="`scores` must be numbers, got nan in 1 of 2 rows"):
        metrics.auroc([0, 1], [0.1, np.nan])
    with pytest.raises(ValueError, match="`average` must be binary, macro or micro, got 'weighted'"):
        metrics.f1([0, 1], [0, 1], average="weighted")


def test_scores_without_a_sign_and_draws_that_lack_a_class():
    labels = [0, 0, 1, 1]
    for scores in (np.array([0, 1, 2, 3], np.uint8), np.array([False, False, True, True])):
        assert metrics.auroc(labels, scores) == metrics.average_precision(labels, scores) == 1.0
    drawn = [2, 1, 0]  # a bootstrap draw without the row of class 2
    assert metrics.f1([0, 1, 2], [0, 1, 1], drawn, average="macro") == 1.0
