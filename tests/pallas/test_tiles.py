"""Tiles in other shapes: what Triton's compiler is told of sides of 1 that come and go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.pallas._tiles import resized, with_axes

SHAPES = [
    ((4, 2), (4, 2)),
    ((4, 2), (4, 2, 1)),
    ((1, 2), (1, 2, 1, 1)),
    ((4, 2, 1), (4, 2)),
    ((1, 2, 1, 64), (1, 2, 64)),
    ((1, 2, 64), (1, 2, 1, 64)),
    ((4, 1, 64), (4, 64)),
    ((1, 1, 64), (1, 64)),
    ((1, 1), (1,)),
    ((4, 1, 1, 8), (4, 8, 1)),
    ((2, 8), (2, 1, 8)),
]


def operations(x, shape) -> set[str]:
    return {e.primitive.name for e in jax.make_jaxpr(lambda x: resized(x, shape))(x).eqns}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
@pytest.mark.parametrize("before, after", SHAPES)
def test_sides_of_one_are_inserted_and_removed_without_a_reshape(before, after, dtype):
    x = np.random.default_rng(0).standard_normal(before).astype(dtype)
    np.testing.assert_array_equal(resized(jnp.asarray(x), after), x.reshape(after))
    assert operations(x, after) <= {"broadcast_in_dim", "reduce_max"}


@pytest.mark.parametrize("before, after", [((4, 2, 8), (4, 16)), ((4, 16), (4, 2, 8)), ((1, 1), ()), ((2, 3), (3, 2))])
def test_other_shapes_are_reshaped(before, after):
    x = np.arange(np.prod(before), dtype=np.float32).reshape(before)
    np.testing.assert_array_equal(resized(jnp.asarray(x), after), x.reshape(after))


def test_masks_and_special_numbers_stay_what_they_are():
    mask = jnp.asarray([[True], [False]])
    np.testing.assert_array_equal(resized(mask, (2,)), [True, False])
    np.testing.assert_array_equal(with_axes(mask, 2), [[[[True]]], [[[False]]]])
    special = np.array([[np.nan], [-np.inf], [-0.0]], np.float32)
    found = np.asarray(resized(jnp.asarray(special), (3,)))
    np.testing.assert_array_equal(found, special[:, 0])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(special[:, 0]))
