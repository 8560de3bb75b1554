"""The numpy evaluator against `jax.numpy`: all operators and their gradients; gradients of gradients by differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn.ir.inter import OPERATORS as TABLE
from dejax.rgnn.passes.gradients.backward import differentiate
from tests.rgnn.evaluate import ELEMENTWISE, _Rows, evaluate, from_rows
from tests.rgnn.preserved import trace
from tests.rgnn.references import graph_of
from tests.rgnn.test_operators import OPERATORS, expected


def floats(inputs: Mapping[int, Any]) -> tuple[int, ...]:
    return tuple(p for p, x in inputs.items() if x.dtype.kind == "f")


def moved(inputs: Mapping[int, Any], by: float) -> dict[int, Any]:
    """The inputs, their floats moved along one direction, the same for each step."""
    rng = np.random.default_rng(2)
    return {p: x + by * rng.normal(size=x.shape) if x.dtype.kind == "f" else x for p, x in inputs.items()}


def inner(xs: Sequence[Any], ys: Sequence[Any]) -> float:
    return float(sum(np.vdot(x, y) for x, y in zip(xs, ys, strict=True)))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_two_derivatives(name: str) -> None:
    """Results and gradients are those of `jax.numpy`, and gradients of gradients those of differences."""
    arrays, want = expected(name, "typical")
    g = graph_of("typical")
    program, inputs = trace(rgnn.program(OPERATORS[name].program), g, arrays)
    inputs = {p: x.astype(np.float64) if x.dtype.kind == "f" else x for p, x in inputs.items()}
    wrt = floats(inputs)
    joint, results = differentiate(program, wrt), evaluate(program, g, inputs)
    first = 1 + max(inputs)
    given = inputs | {first + n: 0.7 * np.cos(y * 0.7 + 0.3) for n, y in enumerate(results)}
    gradients = evaluate(joint, g, given)[len(results) :]
    users = lambda p, x: from_rows(g, program.ops[program.by_position()[p]].space, x)  # noqa: E731
    names = {program.ops[i].attr("position"): program.ops[i].attr("name") for i in program.inputs}
    found = {names[p].partition("['")[2].rstrip("]'"): users(p, x) for p, x in zip(wrt, gradients, strict=True)}
    shown = [from_rows(g, program.ops[o].space, y) for o, y in zip(program.outputs, results, strict=True)]
    pairs = [*zip(shown, want[0], strict=True), *((found.get(key, 0), w) for key, w in want[1].items())]
    for y, w in pairs:  # an array that the program does not use has no gradient
        np.testing.assert_allclose(y, w, rtol=1e-9, atol=1e-9 * (1 + np.abs(w).max()))

    # The derivative along a direction of the gradients' product with fixed arrays. Of moved inputs none are equal.
    given, step = moved(given, 0.01), 1e-6
    with_respect_to = floats(given)
    into = 1 + max(given)
    weights = [np.cos(1.3 * np.arange(x.size)).reshape(x.shape) for x in gradients]
    of_outputs = {into + n: np.zeros(y.shape) for n, y in enumerate(results)}
    of_outputs |= {into + len(results) + n: w for n, w in enumerate(weights)}
    twice = evaluate(differentiate(joint, with_respect_to), g, given | of_outputs)[-len(with_respect_to) :]
    direction = [moved(given, 1.0)[p] - given[p] for p in with_respect_to]
    ahead, behind = (inner(evaluate(joint, g, moved(given, by))[len(results) :], weights) for by in (step, -step))
    scale = 1 + sum(np.abs(x * d).sum() for x, d in zip(twice, direction, strict=True))
    assert abs((ahead - behind) / (2 * step) - inner(twice, direction)) <= 1e-6 * scale


def test_every_operator_has_a_definition() -> None:
    defined = {*ELEMENTWISE, *(name[1:] for name in vars(_Rows) if name.startswith("_")), "input"}
    assert set(TABLE) <= defined, set(TABLE) - defined
