"""Tables that are parts of one array give what tables of their own do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from tests.cases import slow_but
from tests.pallas.reference import GEMMS, TRAVERSALS, WEIGHT_GRADIENTS, interpreted

CASES = {
    **{f"grouped_gemm, {name}": GEMMS[name] for name in list(GEMMS)[:3]},
    **{f"grouped_weight_gradient, {name}": WEIGHT_GRADIENTS[name] for name in list(WEIGHT_GRADIENTS)[:3]},
    **{
        name: TRAVERSALS[name] for name in ("attention", "attention, long segments", "attention, long segments, sorted")
    },
}


def in_one_table(arrays, seed=0):
    """One table that holds all tables of integers among `arrays` between other numbers; and (start, length) of each."""
    rng = np.random.default_rng(seed)
    parts, places, size = [], {}, 0
    for name, array in arrays.items():
        if array.dtype == np.int32 and array.ndim == 1:
            others = rng.integers(-9, 9, rng.integers(1, 7)).astype(np.int32)
            places[name] = size + len(others), len(array)
            parts += [others, array]
            size += len(others) + len(array)
    return np.concatenate([*parts, np.full(3, -1, np.int32)]), places


@pytest.mark.parametrize("name", slow_but(["grouped_gemm, no heads axis", "attention"], CASES))
def test_kernels_read_slices(name):
    case = CASES[name]
    a = case.arrays()
    table, places = in_one_table(a)
    assert len(places) >= 2

    def run(rest, table):
        return case.run({**rest, **{name: kernels.TableSlice(table, *place) for name, place in places.items()}})

    rest = {name: array for name, array in a.items() if name not in places}
    apart, together = interpreted(case.run)(a), interpreted(run)(rest, table)
    jax.tree.map(np.testing.assert_array_equal, together, apart)


def test_as_an_array():
    numbers = kernels.TableSlice(jnp.arange(10, dtype=jnp.int32), 3, 4)
    assert numbers.shape == (4,) and numbers.ndim == 1 and numbers.dtype == jnp.int32
    assert numbers.astype(jnp.int32) is numbers
    np.testing.assert_array_equal(numbers, [3, 4, 5, 6])
    np.testing.assert_array_equal(numbers.array(), [3, 4, 5, 6])
    np.testing.assert_array_equal(jnp.asarray(numbers) + 1, [4, 5, 6, 7])
    np.testing.assert_array_equal(numbers.astype(jnp.float32), [3.0, 4.0, 5.0, 6.0])
