"""Cutoffs and times as int32: any year, times that mean "never", and no change of what an encoder sees."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax.datasets import Column, from_tables, task_of_rows
from dejax.training import Trainer, resolve
from dejax.training.tables.encoders import TableEncoder
from dejax.training.tables.rows import pack
from dejax.training.tables.seed_times import Clock

DAY = 86_400


@pytest.mark.parametrize("year", ["1800", "2024", "2050", "9999"])
def test_times_compare_with_cutoffs_as_before(year):
    cutoffs = np.datetime64(f"{year}-03-01", "s").astype(np.int64) + np.arange(5) * 30 * DAY
    clock = Clock.of(cutoffs, "cutoffs")
    times = np.concatenate([cutoffs - 1, cutoffs, cutoffs + 1, [-(2**63), 2**63 - 1, -(2**31), 0, 253402214400]])
    found, given = clock.relative(times), clock.cutoffs(cutoffs)
    assert found.dtype == given.dtype == np.int32
    np.testing.assert_array_equal(found[:, None] <= given, times[:, None] <= cutoffs)
    assert (clock.day == 0) == (year == "2024")


def test_cutoffs_too_far_apart_are_an_error():
    with pytest.raises(ValueError, match="within 2.* of each other, 136 years in seconds, got 0 and 10000000000"):
        Clock.of(np.array([0, 10**10]), "cutoffs of task 't'")
    with pytest.raises(ValueError, match="cutoffs must be within 68 years of the task's cutoffs, got 10000000000"):
        Clock().cutoffs([10**10])


def test_an_encoder_adds_the_day_from_which_cutoffs_are_counted():
    now = 30_000 * DAY + 4_321
    late = np.array([now - 5, now, now + 5])
    columns = {
        "time": Column("time", np.array([now - 3 * DAY, now, now]), np.zeros(3, bool)),
        "late": Column("number", np.arange(3.0), np.zeros(3, bool), known_at=late),
    }
    found = []
    for day in (29_000, 30_001):
        rows, plan = pack(columns, None, None, day=day)
        encoder = TableEncoder(plan, 8, day=day, rngs=nnx.Rngs(0))
        found.append(encoder(jnp.asarray(rows), jnp.full(3, now - day * DAY, jnp.int32)))
    np.testing.assert_array_equal(*found)


def test_days_beyond_the_integers_of_float32_are_told_apart():
    """Numbers of milliseconds since 1970 are some 2 x 10^7 "days"."""
    now = (2**25 + 1) * DAY
    late = np.array([now, now + 1, now + DAY])
    column = Column("number", np.ones(3), np.zeros(3, bool), known_at=late)
    clock = Clock.of(late, "cutoffs")
    rows, plan = pack({"late": column}, None, None, day=clock.day)
    found = TableEncoder(plan, 8, day=clock.day, rngs=nnx.Rngs(0))(
        jnp.asarray(rows), jnp.asarray(clock.cutoffs(np.full(3, now)))
    )
    assert not np.array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[1], found[2])


def test_fractions_of_times_are_known_from_the_next_whole_number_on():
    np.testing.assert_array_equal(Clock().relative([2.5, 2.0, -2.5, -np.inf]), [3, 2, -2, -(2**31)])
    with pytest.raises(ValueError, match="cutoffs must be whole numbers, got 2.5"):
        Clock().cutoffs([2.0, 2.5])


def test_a_table_alone_without_rows_elsewhere_and_one_class_in_validation():
    """No relation at all, an empty table, rows that are never known, and a measure that does not exist."""
    n = 60
    at = np.datetime64("2050-01-01") + np.arange(n).astype("timedelta64[D]")
    labels = np.where((np.arange(n) >= 40) & (np.arange(n) < 50), 1, np.arange(n) % 2)
    tables = {"o": {"at": at, "y": labels, "x": np.arange(n) % 7.0}, "never": {"at": [], "v": []}}
    data = from_tables(tables, None, None, {"o": "at"}, fixed_features=False)
    task = task_of_rows(data, "t", "o", "y", valid_from=at[40], test_from=at[50])
    settings = resolve("alone", task="tables", fan_outs=(2,), hidden=4, epochs=1, batch_size=32, bins=2)
    with pytest.warns(UserWarning, match="task 't' has one class among its 10 validation examples"):
        trainer = Trainer(settings, data.with_task(task))
    state = trainer.train(trainer.init(0), 1)
    predicted = trainer.task.predict(trainer, state)
    assert predicted.shape == (n,) and np.isfinite(predicted).all()
