"""Segment operators' contract on a GPU, against float64: every case of the interpreted tests, and real sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax import segment
from tests.segment.cases import CASES
from tests.segment.references import SCALES, Case, check, check_gathered

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    check(*CASES[name], "pallas")


REAL = {
    "wide": Case(300_000, 30_000, (64,)),
    "narrow": Case(1_000_000, 100_000, ()),
    "few segments": Case(400_000, 24, (), spread=0.0),
    "hub": Case(300_000, 30_000, (64,), skew=0.44, spread=0.0),
    "float16": Case(300_000, 30_000, (100,), dtype="float16", spread=0.0),
    "int8": Case(300_000, 30_000, (3,), dtype="int8"),
    "one segment": Case(1_000_000, 1, (2,), spread=0.0),
}


@pytest.mark.parametrize("order", ["unsorted", "sorted", "plan"])
@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name, kind, order):
    import dataclasses

    check(kind, dataclasses.replace(REAL[name], order=order), "auto")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
def test_gathered_values_and_gradients(kind, scale):
    check_gathered(kind, scale, "pallas")


def test_equal_bits_in_ten_runs():
    data, ids = (jnp.asarray(a) for a in Case(1_000_000, 100, (8,), spread=4.0).arrays())
    runs = {np.asarray(segment.segment_sum(data, ids, 100, deterministic=True)).tobytes() for _ in range(10)}
    assert len(runs) == 1
