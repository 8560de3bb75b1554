"""One contract for every operator and model, on every backend: float64 references, forward and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph
from tests.rgnn.references import (
    CASES,
    GRAPHS,
    HUB_CHUNK,
    MODELS,
    OPERATORS,
    Size,
    assert_agrees,
    check,
    covering,
    expected,
    graph_of,
    run_case,
)

XLA = Options(backend="xla", precision="f32")
PALLAS = Options(backend="pallas", precision="f32", interpret=True)
BACKENDS = {"xla": XLA, "pallas": PALLAS}
ORDINARY = ("typical", "hubs", "fan_in", "sparse", "one_type")
F32, BF16 = 1e-5, 2e-2


def name_of(value: Any) -> str:
    return str(value)


@pytest.mark.parametrize(("name", "graph", "size"), covering(tuple(CASES), ORDINARY, 2), ids=name_of)
def test_xla_float32(name: str, graph: str, size: Size) -> None:
    check(name, graph, size, XLA, tolerance=F32)
