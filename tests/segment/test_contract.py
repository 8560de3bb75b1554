"""What `dejax.segment` promises: results of numpy and gradients of jax, on XLA and in interpreted kernels.

Each operator, dtype, order of ids and kind of scale stands here once; other files have what goes wrong at the edges.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import segment
from tests.segment.references import BACKENDS, Case, check, check_gathered

CASES = {
    "sum, long segment": ("sum", Case(700, 9, skew=0.8)),
    "sum, bfloat16, planned": ("sum", Case(90, 4, (130,), "bfloat16", "plan")),
    "sum, float64, planned inside jit": ("sum", Case(dtype="float64", order="traced plan")),
    "sum, int8, sorted": ("sum", Case(dtype="int8", order="sorted", ids="uint8")),
    "max, float16, three axes": ("max", Case(70, 5, (2, 1, 3), "float16")),
    "min, uint64, more segments": ("min", Case(20, 300, (2,), "uint64", ids="int64")),
    "mean, int32, no features": ("mean", Case(shape=(), dtype="int32")),
    "softmax": ("softmax", Case()),
    "logsumexp, bfloat16": ("logsumexp", Case(dtype="bfloat16")),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_reductions(name, backend):
    check(*CASES[name], backend)


def plain_sum(x, ids):
    return jax.ops.segment_sum(x, ids, 4)


def plain_softmax(x, ids):
    top = jax.ops.segment_max(x, ids, 4)
    power = jnp.where(((ids >= 0) & (ids < 4))[:, None], jnp.exp(x - top[ids]), 0)
    return power / plain_sum(power, ids)[ids]


def plain_logsumexp(x, ids):
    top = jax.ops.segment_max(x, ids, 4)
    return jnp.log(plain_sum(jnp.exp(x - top[ids]), ids)) + top


PLAIN = {
    "sum": plain_sum,
    "mean": lambda x, ids: plain_sum(x, ids) / plain_sum(jnp.ones((len(x), 1)), ids),
    "max": lambda x, ids: jax.ops.segment_max(x, ids, 4),
    "min": lambda x, ids: jax.ops.segment_min(x, ids, 4),
    "softmax": plain_softmax,
    "logsumexp": plain_logsumexp,
}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "xla") for kind in PLAIN),
        *(pytest.param(kind, "pallas", marks=() if kind in ("sum", "max") else pytest.mark.slow) for kind in PLAIN),
    ],
)
def test_gradients_are_those_of_jax(kind, backend):
    """First derivatives in float64, and a derivative of them in one direction."""
    with jax.enable_x64(True):
        data, ids = (jnp.asarray(a) for a in Case(200, 4, dtype="float64", skew=0.5, spread=0.0).arrays(1))

        def derivatives(operator):
            def loss(x):
                out = operator(x, ids)
                return (jnp.cos(jnp.arange(out.size).reshape(out.shape)) * out**2).sum()

            return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x + 1,)))(data)

        operator = getattr(segment, f"segment_{kind}")
        found = derivatives(lambda x, ids: operator(x, ids, 4, backend=backend))
        for f, w in zip(found, derivatives(PLAIN[kind]), strict=True):
            np.testing.assert_allclose(f, w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gathered_rows_are_reduced_without_messages(backend):
    check_gathered("sum", "head", backend)


def test_errors_name_the_argument_and_the_remedy():
    ids, data = jnp.array([0, 1]), jnp.ones(2)
    with pytest.raises(ValueError, match=r"an entry for each of the 2 segment_ids .* got shape \(3,\)"):
        segment.segment_sum(jnp.ones(3), ids, 2)
    with pytest.raises(ValueError, match="`num_segments` of segment_sum, the size of the result, must be given inside"):
        jax.jit(segment.segment_sum)(data, ids)
