"""Histories of seeds: what the host counts before the first step, against a plain count, and what steps read of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.datasets import HeteroDataset
from dejax.training.tables.history import HistoryReader, RowHistory
from dejax.training.tables.seed_times import DAY, Clock, topology_in_time

WINDOWS = (30, 90, 365)


def random_relations(rng):
    """Edges to the table "a" by relation, half of them with times, of days or of seconds; and the length of a day."""
    day = int(rng.choice([1, DAY]))
    counts = {"a": int(rng.integers(1, 20)), "b": int(rng.integers(1, 30))}
    edges, times = {}, {}
    for number in range(int(rng.integers(1, 5))):
        size, source = int(rng.integers(0, 300)), str(rng.choice(["a", "b"]))
        relation = (source, f"r{number}", "a")
        edges[relation] = rng.integers(0, counts[source], size), rng.integers(0, counts["a"], size)
        if rng.random() < 0.7:
            known = rng.integers(-500, 500, size) * day + rng.integers(0, day, size)
            times[relation] = np.where(rng.random(size) < 0.1, rng.choice([2**40, -(2**40)], size), known)
    return day, counts, edges, times


def dataset(day, counts, edges, times):
    return HeteroDataset("random", counts, edges, edge_times=times, time_unit="s" if day == DAY else None)


def reader(data, clock, on_host):
    topology = topology_in_time(data, clock, latest=True, on_host=on_host)
    return HistoryReader(RowHistory.of(data, topology, "a"), topology)


def plain_count(day, edges, times, row, cutoff, always):
    """The numbers of one row, by integers and float64, and -1 for log of what is none; by relations with edges."""
    found = []
    for relation, (_, receivers) in edges.items():
        if not len(receivers):
            continue
        known = times.get(relation, np.full(len(receivers), always))[receivers == row]
        known = np.maximum(known[known <= cutoff], always)
        found.append(len(known))
        if relation in times:
            some = len(known) and known.max() > always
            found.append((cutoff - int(known.max())) / day if some else np.nan)
            found += [int((known > max(cutoff - days * day, always)).sum()) for days in WINDOWS]
    return found


@pytest.mark.parametrize("on_host", [False, True])
def test_numbers_are_those_of_a_plain_count(on_host):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        day, counts, edges, times = random_relations(rng)
        clock = Clock(int(rng.integers(-100, 100)) if day == DAY else 0)
        read = reader(dataset(day, counts, edges, times), clock, on_host)
        rows = rng.integers(-1, counts["a"], 40)
        given = rng.integers(-600, 600, 40) * day + rng.integers(0, day, 40)
        found = read.numbers(rows, clock.cutoffs(given))
        always = -(2**31) + clock.day * DAY
        wanted = [plain_count(day, edges, times, *of, always) for of in zip(rows.tolist(), given.tolist(), strict=True)]
        wanted = np.array(wanted, np.float64).reshape(found.shape)
        whole = np.array(["days since" not in name for name in read.history.names], bool)
        np.testing.assert_array_equal(np.expm1(found[:, whole].astype(np.float64)).round(), wanted[:, whole])
        np.testing.assert_allclose(found, np.log1p(wanted), rtol=1e-6, atol=1e-7)
        at = clock.cutoffs(given)
        fitted = read.fitted(rows, at, 4)
        plan, kept = fitted.history.plan, list(fitted.history.kept)
        mean, deviation = (np.array([getattr(c, name)[0] for c in plan.columns]) for name in ("mean", "deviation"))
        packed = np.asarray(fitted.history.packed(jnp.asarray(fitted.counts(rows, at)), jnp.asarray(at)))
        np.testing.assert_allclose(packed, (found[:, kept] - mean) / deviation, rtol=1e-5, atol=1e-5)


def test_rows_later_than_a_cutoff_change_no_bit_of_a_history():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        day, counts, edges, times = random_relations(rng)
        if not times or not all(len(own) for own in times.values()):
            continue
        clock, rows = Clock(), rng.integers(0, counts["a"], 40)
        for relation in times:  # some row stays, so that the relation has numbers
            times[relation][0] = -700 * day
        whole = reader(dataset(day, counts, edges, times), clock, True)
        whole = whole.fitted(rows, clock.cutoffs(np.full(40, 600 * day)), 4)
        for cutoff in (-100, 300):
            at = clock.cutoffs(np.full(40, cutoff * day))
            early = {relation: own <= cutoff * day for relation, own in times.items()}
            every = {
                relation: tuple(ends[early[relation]] for ends in both) if relation in early else both
                for relation, both in edges.items()
            }
            cut = dataset(day, counts, every, {relation: own[early[relation]] for relation, own in times.items()})
            topology = topology_in_time(cut, clock, latest=True, on_host=True)
            of_cut = HistoryReader(RowHistory.of(cut, topology, "a"), topology)
            assert of_cut.history.names == whole.history.names
            np.testing.assert_array_equal(
                of_cut.numbers(rows, at).view(np.int32), whole.numbers(rows, at).view(np.int32)
            )
            of_cut = of_cut.fitted(rows, at, 4)
            fitted = whole.fitted(rows, at, 4)
            assert of_cut.history.plan == fitted.history.plan
            np.testing.assert_array_equal(of_cut.counts(rows, at), fitted.counts(rows, at))
