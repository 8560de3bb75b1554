"""dejax's own lowering on a GPU, at its edges: with `DEJAX_LOWERING=dejax` all tests of kernels test it, too."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.pallas import _triton
from dejax.pallas.lowering import binary
from dejax.pallas.lowering.choice import lowered_by
from dejax.pallas.lowering.launch import HANDLER
from tests.gpu import test_slices_gpu
from tests.pallas.reference import GEMMS, TRAVERSALS, WEIGHT_GRADIENTS, Gemm

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path))
    with lowered_by("dejax"):
        yield


def on_gpu(case):
    return jax.jit(functools.partial(case.run, interpret=False))


CASES = {
    "product": GEMMS["row-scaled"],
    "much shared memory": Gemm(k=256, n=256, heads=1, counts=(300, 90), block=64),
    "gradient": WEIGHT_GRADIENTS["row-scaled, 64 by 64"],
    "traversal": TRAVERSALS["attention, long segments"],
}


@pytest.mark.parametrize("name", CASES)
def test_kernels(name):
    case, arrays = CASES[name], CASES[name].arrays()
    run = on_gpu(case)
    for _ in range(3):  # the later calls as a CUDA graph
        case.check(run(arrays), arrays)


def test_a_loop_stacks_what_a_call_writes_in_place():
    test_slices_gpu.test_a_loop_stacks_what_single_calls_give(test_slices_gpu.cleared)


def test_many_calls_in_one_program():
    case, arrays = TRAVERSALS["sum"], TRAVERSALS["sum"].arrays()

    @jax.jit
    def several(x):
        return [case.run(arrays | {"x": factor * x}, interpret=False) for factor in (1, 2, 4)]

    for _ in range(3):
        one, two, four = (np.asarray(jax.tree.leaves(found)[0]) for found in several(jnp.asarray(arrays["x"])))
        np.testing.assert_array_equal(two, 2 * one)
        np.testing.assert_array_equal(four, 4 * one)


def test_the_binary_travels_with_an_exported_program():
    case, arrays = CASES["traversal"], CASES["traversal"].arrays()
    checks = [jax.export.DisabledSafetyCheck.custom_call(HANDLER)]
    exported = jax.export.export(on_gpu(case), disabled_checks=checks)(arrays)
    case.check(jax.export.deserialize(exported.serialize()).call(arrays), arrays)


def scaled_by_two(x, *, name):
    def kernel(x, out):
        at = (jnp.arange(16),)
        _triton.store(out, at, _triton.maximum(_triton.load(x, at) * 2, 0.0))

    (found,) = _triton.pallas_call(
        kernel, name=name, num_programs=1, out_shape=[jax.ShapeDtypeStruct((16,), jnp.float32)], num_warps=1,
        num_stages=1, interpret=False,
    )(x)  # fmt: skip
    return found


def test_nan_stays():
    x = jnp.arange(16.0).at[3].set(jnp.nan)
    np.testing.assert_array_equal(jax.jit(functools.partial(scaled_by_two, name="nan"))(x), 2 * x)


def test_an_error_names_the_kernel(monkeypatch):
    compiled = binary._compiled
    monkeypatch.setattr(binary, "_compiled", lambda source: dataclasses.replace(compiled(source), image=b"no binary"))
    with pytest.raises(Exception, match="the kernel broken: cuModuleLoadData"):
        jax.block_until_ready(jax.jit(functools.partial(scaled_by_two, name="broken"))(jnp.zeros(16)))
