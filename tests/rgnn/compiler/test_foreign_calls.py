"""Functions of jax.numpy, jax.nn and numpy on values of a program raise an error that names the replacement."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn.compiler import functional
from dejax.rgnn.compiler.frontend import foreign_calls

TRIANGLE = rgnn.RelGraph.from_edges([0, 1, 2], [1, 2, 0], [0, 0, 0], num_nodes=3)

CALLS = {
    "jnp.where": (lambda x: jnp.where(x > 0, x, 0.0), "rgnn.where"),
    "jnp.where of an array's condition": (lambda x: jnp.where(jnp.ones(2) > 0, x, 0.0), "rgnn.where"),
    "jnp.exp": (lambda x: jnp.exp(x), "rgnn.exp"),
    "jnp.sum": (lambda x: jnp.sum(x, axis=-1), "rgnn.sum"),
    "jnp.concatenate": (lambda x: jnp.concatenate([x, x]), "rgnn.concatenate"),
    "jnp.roll": (lambda x: jnp.roll(x, 1), "rgnn.concatenate"),
    "jnp.ravel": (lambda x: jnp.ravel(x), "x.reshape"),
    "jnp.moveaxis": (lambda x: jnp.moveaxis(x, 0, 1), "x.transpose"),
    "jnp.vstack": (lambda x: jnp.vstack([x, x]), "rgnn.stack"),
    "jnp.matmul": (lambda x: jnp.matmul(x, jnp.ones((2, 2))), "x @ w"),
    "jnp.einsum": (lambda x: jnp.einsum("k,k->", x, x), "x @ w, rgnn.dot"),
    "jnp.take": (lambda x: jnp.take(x, 0), r"x[ids]"),
    "jnp.power": (lambda x: jnp.power(x, 2.0), "x ** y"),
    "jnp.logical_and": (lambda x: jnp.logical_and(x, x), "x & y"),
    "jnp.expand_dims": (lambda x: jnp.expand_dims(x, -1), "x[..., None]"),
    "jax.nn.relu": (lambda x: jax.nn.relu(x), "rgnn.relu"),
    "jax.nn.softmax": (lambda x: jax.nn.softmax(x), "rgnn.softmax"),
    "jax.nn.logsumexp": (lambda x: jax.nn.logsumexp(x), "rgnn.logsumexp"),
    "jax.lax.rsqrt": (lambda x: jax.lax.rsqrt(x), "rgnn.rsqrt"),
    "jax.lax.select": (lambda x: jax.lax.select(x > 0, x, x), "rgnn.where"),
    "jax.ops.segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.zeros(3, int), 2), "g.sum_by"),
    "np.exp": (lambda x: np.exp(x), "rgnn.exp"),
    "np.where": (lambda x: np.where(x > 0, x, 0.0), "rgnn.where"),
    "np.sum": (lambda x: np.sum(x), "rgnn.sum"),
    "jnp.tril, which rgnn has nothing for": (lambda x: jnp.tril(x), "use those of rgnn"),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("untyped", [False, True], ids=["value", "argument"])
def test_calls(what, untyped):
    """Also on an argument without a space."""
    function, ours = CALLS[what]
    program = rgnn.program(lambda g, x: function(x if untyped else g.node(x)))
    with pytest.raises(rgnn.ProgramError) as raised:
        program(TRIANGLE, jnp.ones((3, 2)))
    message = str(raised.value)
    path, line = re.match(r"(.*?):(\d+): ", message).groups()
    assert (path, int(line)) == (__file__, function.__code__.co_firstlineno)
    words = ours if ours in message or not untyped else "without saying what its rows stand for"
    assert words in message, message


def test_named_replacements_exist():
    remedies = {name for text in foreign_calls._OTHER.values() for name in re.findall(r"rgnn\.(\w+)", text)}
    assert all(hasattr(rgnn, name) for name in remedies)
    assert functional.where is rgnn.where


def test_other_errors_are_not_changed():
    def wrong(g, x):
        jnp.ones((2,)) @ jnp.ones((3,))
        return g.node(x)

    with pytest.raises(TypeError, match="dot_general"):
        rgnn.program(wrong)(TRIANGLE, jnp.ones((3, 2)))

    def missing(g, x):
        return g.node(x).nothing

    with pytest.raises(AttributeError, match="nothing"):
        rgnn.program(missing)(TRIANGLE, jnp.ones((3, 2)))


def test_arrays_on_the_left():
    """Operators of arrays defer to those of the value."""
    x, c = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.array([2.0, 3.0], np.float32)
    for array in (c, jnp.asarray(c)):
        program = rgnn.program(lambda g, x, array=array: (array * g.node(x), array - g.node(x), array > g.node(x)))
        product, difference, larger = program(TRIANGLE, x)
        np.testing.assert_allclose(product, c * x)
        np.testing.assert_allclose(difference, c - x)
        np.testing.assert_allclose(larger, c > x)
