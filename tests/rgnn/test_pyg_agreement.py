"""RGCN, RGAT and HGT give what PyTorch Geometric gives on the same weights: outputs and gradients.

The arrays and how they were made, with the mapping of parameters: tests/rgnn/data/make_pyg_arrays.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.rgnn import Options, library
from dejax.rgnn.graph import RelGraph

DATA = Path(__file__).parent / "data"
BACKENDS = {"xla": Options(backend="xla", precision="f32"), "pallas": Options(backend="pallas", precision="f32", interpret=True)}


@cache
def load(layer: str) -> dict[str, dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(DATA / f"pyg_{layer}.npz") as file:
        for name in file.files:
            case, key = name.split("/")
            cases.setdefault(case, {})[key] = file[name]
    return cases


def names(layer: str) -> list[str]:
    return list(load(layer))


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
    """Agreement to float32's rounding of sums of the size of the largest number."""
    assert got.shape == want.shape, what
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-6 * max(1.0, np.abs(want).max()), err_msg=what)


def agree(case: dict[str, np.ndarray], layer: Callable[[RelGraph, Any, dict[str, Any]], Any]) -> None:
    graph = graph_of(case)
    params = {k.removeprefix("param_"): jnp.asarray(v, jnp.float32) for k, v in case.items() if k.startswith("param_")}
    x = jnp.asarray(case["x"], jnp.float32) if "x" in case else None
    cotangent = jnp.asarray(case["cotangent"], jnp.float32)

    def loss(x: Any, params: dict[str, Any]) -> Any:
        out = layer(graph, x, params)
        return jnp.vdot(out, cotangent), out

    gradients = jax.jit(jax.grad(loss, argnums=(1,) if x is None else (0, 1), has_aux=True))
    grads, out = gradients(x, params)
    close(out, case["out"], "output")
    compared = 0
    for name, grad in grads[-1].items():
        if f"grad_{name}" in case:
            close(grad, case[f"grad_{name}"], f"gradient of {name}")
        else:
            # PyTorch Geometric shares this vector among the relations, so its gradient is the sum over them.
            close(grad.sum(0), case[f"grad_sum_{name}"], f"gradient of {name}, summed over the relations")
        compared += 1
    assert compared == sum(k.startswith("grad_") and k != "grad_x" for k in case)
    if x is not None:
        close(grads[0], case["grad_x"], "gradient of x")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", names("rgcn"))
def test_rgcn(name: str, backend: str) -> None:
    normalization: Any = name.split("_")[0]
    options = BACKENDS[backend]
    agree(load("rgcn")[name], lambda g, x, p: library.rgcn(g, x, p, normalization=normalization, options=options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", names("rgat"))
def test_rgat(name: str, backend: str) -> None:
    softmax, _, heads = name.split("_")
    keywords: dict[str, Any] = {"softmax": softmax, "concat_heads": heads == "concat", "options": BACKENDS[backend]}
    agree(load("rgat")[name], lambda g, x, p: library.rgat(g, x, p, **keywords))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", names("hgt"))
def test_hgt(name: str, backend: str) -> None:
    options = BACKENDS[backend]
    agree(load("hgt")[name], lambda g, x, p: library.hgt(g, x, p, options=options))


def test_what_the_cases_cover() -> None:
    """The agreement above means little unless the graph has the hard cases and the numbers are not all alike."""
    case = load("rgcn")["mean_full"]
    graph = graph_of(case)
    counts = np.bincount(case["edge_type"], minlength=graph.num_edge_types)
    assert (counts == 0).any(), "no empty edge type"
    assert (np.bincount(case["receivers"], minlength=graph.num_nodes) == 0).any(), "no node without incoming edges"
    assert (case["senders"] == case["receivers"]).any(), "no self loop"
    assert len(np.unique(np.stack([case["senders"], case["receivers"], case["edge_type"]]), axis=1).T) < len(case["senders"])
    assert len(load("rgcn")) == 12 and len(load("rgat")) == 6 and len(load("hgt")) == 2
