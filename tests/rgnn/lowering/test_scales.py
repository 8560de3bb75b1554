"""How large the columns of computed values are estimated to be, against the values themselves."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options
from dejax.rgnn.ir.inter import OpProgram
from dejax.rgnn.lowering.scales import ColumnScales
from dejax.rgnn.lowering.segments import num_rows
from dejax.rgnn.lowering.xla import Evaluator
from tests.rgnn.lowering import scaled

# Sums of a hundred rows, products of 32 features and elements that cancel.
WITHIN = 2.0**14


def programs(name: str, monkeypatch: pytest.MonkeyPatch) -> list[OpProgram]:
    """The forward and the backward program of a case, as kernels run them."""
    execute = importlib.import_module("dejax.rgnn.compiler.execute")
    compiled, found = execute.inference_kernels, {}

    def kernels(task: Any) -> Any:
        made = compiled(task)
        found[made.program] = None
        return made

    monkeypatch.setattr(execute, "inference_kernels", kernels)
    case, options = scaled.CASES[name], Options(backend="pallas", interpret=True)
    arrays = jax.tree.map(np.float32, scaled.arrays(case))
    loss = lambda a: jnp.sum(case.function(scaled.graph(), a, options))  # noqa: E731
    jax.make_jaxpr(jax.grad(loss))(arrays)
    return list(found)


def inputs(program: OpProgram, seed: int) -> dict[int, jax.Array]:
    """Random arrays; each feature of an array has a scale of its own."""
    rng, found = np.random.default_rng(seed), {}
    for i in program.inputs:
        op = program.ops[i]
        shape = (num_rows(scaled.graph(), op.space), *op.shape)
        scales = 10.0 ** rng.integers(-4, 5, size=op.shape)
        found[i] = jnp.asarray(rng.normal(size=shape) * scales, op.dtype)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "kept heads",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("typed_sum", "heads", "halves", "rgat", "hgt")),
    ],
)
def test_estimates_are_within_a_factor_of_the_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = 0
    for seed, program in enumerate(programs(name, monkeypatch)):
        given = inputs(program, seed)
        values = [i for i, op in enumerate(program.ops) if op.name != "input" and op.dtype == "float32"]

        @jax.jit
        def computed(env: Any, program: OpProgram = program, values: Any = tuple(values)) -> tuple[Any, Any]:
            scales = ColumnScales(program, env, list(values), interpret=True)
            env = dict(env)
            Evaluator(program, scaled.graph(), "f32").compute(values, env)
            return {v: env[v] for v in values}, {v: scales.powers(v, jnp.float32) for v in values}

        env, estimates = computed(given)
        for v in values:
            powers = estimates[v]
            if powers is None or not np.all(np.isfinite(env[v])):
                continue
            largest = np.abs(np.asarray(env[v], np.float64)).max(0).reshape(-1)
            ratio = (largest / np.asarray(powers, np.float64).reshape(-1))[largest > 0]
            spread = ratio.max() / ratio.min()
            assert spread <= WITHIN, f"%{v} = {program.ops[v]}: columns differ by {spread:.1e} after division"
            checked += 1
    assert checked >= 4


def test_residual_layers_in_one_program_have_short_estimates() -> None:
    """Each layer reads the one before twice: an estimate through all of them would take 2^40 steps."""

    @rgnn.program
    def layers(g: Any, x: Any, w: Any) -> Any:
        h = g.node(x)
        for _ in range(40):
            h = h + g.sum_to_dst(g.src(h) @ g.per_edge_type(w))
        return h

    options = Options(backend="pallas", interpret=True)
    case = scaled.arrays(scaled.CASES["typed_sum"])
    jax.make_jaxpr(lambda x, w: layers(scaled.graph(), x, w, options=options))(*(np.float32(case[k]) for k in "xw"))
