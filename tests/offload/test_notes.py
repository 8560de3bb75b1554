"""Calls that store nothing say so once."""

import jax
import jax.numpy as jnp
import pytest

from dejax.offload import ActivationStore, offload
from tests.offload.layers import operands


@pytest.fixture
def store():
    with ActivationStore() as store:
        yield store


def test_a_call_that_stores_nothing_warns_once(store, recwarn):
    w, x = operands()[0][0], operands()[1]

    def small(w, x):
        return jnp.tanh(x @ w)

    def linear(w, x):
        return x + 1

    for body in offload(linear), offload(small, policy=[]), offload(small, min_bytes=1), offload(small, store="device"):
        jax.grad(lambda x, body=body: body(w, x).sum())(x)
        if body.__wrapped__ is small:
            continue
        assert not recwarn.list
    offload(small)(w, x)  # without a derivative nothing is to be stored
    before = [str(w.message) for w in recwarn.list]
    with pytest.warns(UserWarning, match=r"`.*small` stores nothing: the largest of \d tensors .* 8,192 bytes") as seen:
        for _ in range(3):
            jax.grad(lambda x: offload(small, min_bytes=9000)(w, x).sum())(x)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert store.summary().count("small` stores nothing") == 1 + any("small" in text for text in before)
