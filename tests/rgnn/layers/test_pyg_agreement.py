"""RGCN, RGAT and HGT give what PyTorch Geometric gives on the same weights: outputs and gradients.

The arrays and how they were made, with the mapping of parameters: tests/rgnn/data/make_pyg_arrays.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.rgnn import Options, library
from dejax.rgnn.graphs.rel_graph import RelGraph
from tests.rgnn.preserved import by_numpy

DATA = Path(__file__).parent / "data"
BACKENDS = {
    "xla": Options(backend="xla", precision="f32"),
    "pallas": Options(backend="pallas", precision="f32", interpret=True),
}


@cache
def load(layer: str) -> dict[str, dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(DATA / f"pyg_{layer}.npz") as file:
        for name in file.files:
            case, key = name.split("/")
            cases.setdefault(case, {})[key] = file[name]
    return cases


def runs(layer: str) -> list[Any]:
    """Every case by numpy; on XLA and in kernels they are slow."""
    slow = [pytest.param(name, backend, marks=pytest.mark.slow) for backend in BACKENDS for name in load(layer)]
    return [*((name, "numpy") for name in load(layer)), *slow]


def graph_of(case: dict[str, np.ndarray]) -> RelGraph:
    more = {}
    if "node_type" in case:
        more = {"node_type": case["node_type"], "num_node_types": int(case["num_node_types"])}
    return RelGraph.from_edges(
        case["senders"],
        case["receivers"],
        case["edge_type"],
        num_nodes=int(case["num_nodes"]),
        num_edge_types=int(case["num_edge_types"]),
        **more,
    )


def close(got: Any, want: np.ndarray, what: str) -> None:
    """Agreement to rounding: of float64, or of float32 in sums whose terms cancel."""
    assert got.shape == want.shape, what
    relative, absolute = (1e-11, 1e-12) if got.dtype == jnp.float64 else (2e-5, 1e-5)
    scale = max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(np.asarray(got), want, rtol=relative, atol=absolute * scale, err_msg=what)


def agree(case: dict[str, np.ndarray], program: Callable[..., Any], backend: str, **keywords: Any) -> None:
    """Numpy and XLA are compared in float64, where only a wrong equation can differ; the kernels compute in float32."""
    exact = backend != "pallas"
    with jax.enable_x64(exact), by_numpy() if backend == "numpy" else nullcontext():
        dtype = jnp.float64 if exact else jnp.float32
        graph = graph_of(case)
        params = {k.removeprefix("param_"): jnp.asarray(v, dtype) for k, v in case.items() if k.startswith("param_")}
        x = jnp.asarray(case["x"], dtype) if "x" in case else None
        cotangent = jnp.asarray(case["cotangent"], dtype)

        def loss(x: Any, params: dict[str, Any]) -> Any:
            out = program(graph, x, params, options=BACKENDS.get(backend), **keywords)
            return jnp.vdot(out, cotangent), out

        gradients = jax.grad(loss, argnums=(1,) if x is None else (0, 1), has_aux=True)
        gradients = gradients if backend == "numpy" else jax.jit(gradients)
        grads, out = gradients(x, params)
        assert out.dtype == dtype
        close(out, case["out"], "output")
        assert grads[-1].keys() == {k.split("grad_")[1].removeprefix("sum_") for k in case if k.startswith("grad_")} - {
            "x"
        }
        for name, grad in grads[-1].items():
            if f"grad_{name}" in case:
                close(grad, case[f"grad_{name}"], f"gradient of {name}")
            else:
                # PyTorch Geometric shares this vector among the relations, so its gradient is the sum over them.
                close(grad.sum(0), case[f"grad_sum_{name}"], f"gradient of {name}, summed over the relations")
        if x is not None:
            close(grads[0], case["grad_x"], "gradient of x")


@pytest.mark.parametrize(("name", "backend"), runs("rgcn"))
def test_rgcn(name: str, backend: str) -> None:
    agree(load("rgcn")[name], library.rgcn, backend, normalization=name.split("_")[0])


@pytest.mark.parametrize(("name", "backend"), runs("rgat"))
def test_rgat(name: str, backend: str) -> None:
    softmax, _, heads = name.split("_")
    agree(load("rgat")[name], library.rgat, backend, softmax=softmax, concat_heads=heads == "concat")


@pytest.mark.parametrize(("name", "backend"), runs("hgt"))
def test_hgt(name: str, backend: str) -> None:
    agree(load("hgt")[name], library.hgt, backend)


def test_what_the_cases_cover() -> None:
    """The agreement above means little unless the graph has the hard cases."""
    case = load("rgcn")["mean_full"]
    graph = graph_of(case)
    edges = np.stack([case["senders"], case["receivers"], case["edge_type"]])
    assert (np.bincount(case["edge_type"], minlength=graph.num_edge_types) == 0).any(), "no empty edge type"
    assert (np.bincount(case["receivers"], minlength=graph.num_nodes) == 0).any(), "no node without incoming edges"
    assert (case["senders"] == case["receivers"]).any(), "no self loop"
    assert np.unique(edges, axis=1).shape[1] < edges.shape[1], "no duplicate edge"
    assert (len(load("rgcn")), len(load("rgat")), len(load("hgt"))) == (12, 6, 2)
