"""Tuning on the CPU, with interpreted kernels and a fake clock: which kernels are timed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.rgnn import Options, RelGraph, library

OPTIONS = Options(backend="pallas", precision="f32", interpret=True)


@pytest.fixture
def case(tmp_path, monkeypatch):
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng(0)
    graph = RelGraph.from_edges(
        rng.integers(0, 9, 40), rng.integers(0, 9, 40), rng.integers(0, 2, 40), num_nodes=9, num_edge_types=2
    )
    return graph, jnp.ones((9, 3)), {"weight": jnp.ones((2, 3, 4))}


@pytest.mark.slow
def test_every_kernel_is_tuned_and_stored(case, tmp_path):
    graph, x, params = case
    lines = []

    def clock(candidates, call):
        return [1e-3, *(None for _ in candidates[2:]), 1e-4]

    def measure(candidates, call):
        jax.block_until_ready(call(candidates[0]))  # candidates can be called
        return clock(candidates, call)

    report = library.rgcn.tune(graph, x, params, options=OPTIONS, measure=measure, progress=lines.append)
    kinds = [t.kernel for t in report.kernels]
    assert {"gemm", "outer", "traversal"} <= set(kinds)
    assert len(lines) == len(kinds)
    assert all(t.tried == 2 for t in report.kernels)
    assert report.path is not None and report.path.parent == tmp_path and report.path.exists()
    assert "10.00x" in str(report)
    assert library.rgcn.tune(graph, x, params, options=OPTIONS, measure=clock, save=False).path is None


@pytest.mark.cpu_only("a GPU is there")
def test_tuning_needs_a_gpu_and_concrete_arrays(case):
    graph, x, params = case
    with pytest.raises(RuntimeError, match="tune needs a GPU, got the default device .*cpu"):
        library.rgcn.tune(graph, x, params)
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.jit(lambda x: library.rgcn.tune(graph, x, params))(x)
