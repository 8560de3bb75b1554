"""A stack whose layers run in several ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.offload import ActivationStore, offload
from dejax.offload.plan import measure
from dejax.offload.plan.loops import scan_pieces


@pytest.mark.slow
def test_layers_run_in_several_ways_share_parameters_and_gradients():
    keys = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(keys[0], (8, 128, 128)) / 12, "shift": jnp.arange(8)}
    x = {"a": jax.random.normal(keys[1], (8, 128)), "b": jnp.ones((8, 128))}

    def body(p, x):
        return {"a": x["a"] + jnp.tanh(x["b"] @ p["w"]) @ p["w"].T, "b": x["a"] * jnp.cos(p["shift"])}

    def compiled(stack):
        def loss(params, x):
            return sum((leaf**2).mean() for leaf in jax.tree.leaves(stack(params, x)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)).lower(params, x).compile()

    offloads = {"inputs": 1, "min_bytes": 1}
    pieces = [
        (offload(body, **offloads), 2),
        (offload(jax.checkpoint(body), **offloads), 1),
        (jax.checkpoint(body), 2),
        (body, 3),
    ]
    plain = compiled(lambda params, x: measure.scan_layers(body, params, x))
    with ActivationStore() as store:
        mixed = compiled(lambda params, x: scan_pieces(pieces, params, x))
        got = mixed(params, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain(params, x)), strict=True):
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0
    # Neither the parameters nor their gradients are there twice.
    temps = [step.memory_analysis().temp_size_in_bytes for step in (mixed, plain)]
    assert temps[0] < temps[1] + params["w"].nbytes // 4
