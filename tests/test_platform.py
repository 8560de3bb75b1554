"""A machine with a GPU whose default device is a CPU, or whose arguments lie on a CPU: programs run there.

Here jax says that it has a GPU, and has none. `tests/gpu/test_platform_gpu.py` asks the same of a machine with one.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import dejax
from dejax import _platform, rgnn, segment
from dejax.pallas.machine import compute_capability
from tests.described import gpus

CPU = jax.devices("cpu")[0]
SENDERS, RECEIVERS, TYPES = np.random.default_rng(0).integers(0, [[9], [9], [2]], (3, 40))
X, WEIGHTS = np.ones((9, 4), np.float32), np.full((2, 4, 4), 0.25, np.float32)


@pytest.fixture
def has_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@rgnn.program
def mean_by_relation(g, x, w):
    return g.mean_to_dst(g.src(x) @ g.per_edge_type(w))


def test_the_platform_is_that_of_the_mesh_then_of_the_default_device(has_gpu):
    assert _platform.platform() == "gpu"
    for device in (CPU, "cpu"):
        with jax.default_device(device):
            assert _platform.platform() == "cpu"
            assert _platform.default_device() == CPU
            with jax.sharding.use_abstract_mesh(gpus("NVIDIA H100")):
                assert _platform.platform() == "gpu" and compute_capability() == 90
    seen = []
    mapped = jax.shard_map(
        lambda x: (seen.append(_platform.platform()), x)[1],
        mesh=jax.sharding.Mesh([CPU], ("x",)),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    jax.jit(mapped)(jnp.ones(2))
    assert seen == ["cpu"]


def gradient(graph):
    return jax.jit(jax.value_and_grad(lambda w, graph, x: (mean_by_relation(graph, x, w) ** 2).sum()))(
        jnp.asarray(WEIGHTS), graph, jnp.asarray(X)
    )


def test_a_program_on_the_default_device(has_gpu):
    with jax.default_device(CPU):
        graph = rgnn.RelGraph.from_edges(SENDERS, RECEIVERS, TYPES, num_nodes=9)
        value, found = gradient(graph)
        np.testing.assert_allclose(mean_by_relation(graph, X, WEIGHTS).sum(), len(set(RECEIVERS)) * 4, rtol=1e-6)
        assert "pallas_call" not in str(jax.make_jaxpr(gradient)(graph))
    np.testing.assert_allclose(found.sum(), 2 * value / 0.25, rtol=1e-5)


@pytest.mark.cpu_only("on a GPU arguments would lie there; tests/gpu has arguments on a CPU")
def test_a_program_whose_arguments_lie_on_a_cpu(has_gpu):
    graph = rgnn.RelGraph.from_edges(SENDERS, RECEIVERS, TYPES, num_nodes=9)
    with pytest.warns(UserWarning, match="kernels are interpreted.*default_device"):
        value, found = gradient(graph)
    np.testing.assert_allclose(found.sum(), 2 * value / 0.25, rtol=1e-3)


@pytest.mark.cpu_only("on a GPU arguments would lie there; tests/gpu has arguments on a CPU")
def test_segments_whose_arguments_lie_on_a_cpu(has_gpu):
    data, ids = np.arange(12.0, dtype=np.float32).reshape(3, 4), np.array([1, 0, 1, 3])
    summed = jax.vmap(lambda x: segment.segment_sum(x, ids, 4, deterministic=True))
    with pytest.warns(UserWarning, match="kernels are interpreted"):
        found, pulled = jax.vjp(summed, data)
        np.testing.assert_array_equal(found[:, 1], data[:, 0] + data[:, 2])
        np.testing.assert_array_equal(*pulled(found), found[:, ids])


def test_one_place_asks_for_the_platform():
    """jax's default backend is not where a program runs; `dejax/_platform.py` says that."""
    folder = Path(dejax.__file__).parent
    allowed = {"_platform.py", "info.py", "__main__.py", "pallas/lowering/launch.py"}  # the last: is there a GPU at all
    asks = re.compile(r"default_backend\(|(?<!local_)devices\(\)\[0\]|local_devices\(\)\[0\]")
    found = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if asks.search(re.sub(r"`[^`]*`", "", path.read_text(encoding="utf-8")))
    }
    assert found <= allowed
