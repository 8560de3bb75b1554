"""The numpy evaluator against `jax.numpy`: all operators, with first and second derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn.ir.inter import OPERATORS as TABLE
from dejax.rgnn.passes.backward import differentiate
from tests.rgnn.evaluate import ELEMENTWISE, _Rows, evaluate, from_rows
from tests.rgnn.preserved import trace
from tests.rgnn.references import graph_of
from tests.rgnn.test_operators import OPERATORS, expected


def results_and_derivatives(name: str, graph: str, arrays: dict[str, Any]) -> tuple[list, dict, dict]:
    """Results of an operator's program, gradients of a sum of sines, and those of a sum of sines of the gradients."""
    g = graph_of(graph)
    program, inputs = trace(rgnn.program(OPERATORS[name].program), g, arrays)
    inputs = {p: x.astype(np.float64) if x.dtype.kind == "f" else x for p, x in inputs.items()}
    names = {program.ops[i].attr("position"): program.ops[i].attr("name") for i in program.inputs}
    wrt = tuple(p for p, x in inputs.items() if x.dtype.kind == "f")
    joint = differentiate(program, wrt)
    results = evaluate(program, g, inputs)
    first, count = 1 + max(names), len(results)
    given = inputs | {first + n: 0.7 * np.cos(y * 0.7 + 0.3) for n, y in enumerate(results)}
    gradients = evaluate(joint, g, given)[count:]
    # The gradients depend on the inputs by the cotangents, too, whose derivative goes through the results.
    cotangents = tuple(range(first, first + count))
    twice = differentiate(joint, (*wrt, *cotangents))
    into = 1 + max(given)
    zeros = {into + n: np.zeros(y.shape) for n, y in enumerate(results)}
    outer = given | zeros | {into + count + n: np.cos(x) for n, x in enumerate(gradients)}
    found = evaluate(twice, g, outer)[count + len(wrt) :]
    of_cotangents = found[len(wrt) :]
    back = {
        first + n: c * -0.49 * np.sin(y * 0.7 + 0.3)
        for n, (c, y) in enumerate(zip(of_cotangents, results, strict=True))
    }
    through = evaluate(joint, g, inputs | back)[count:]
    second = [x + y for x, y in zip(found[: len(wrt)], through, strict=True)]
    user = lambda p, x: from_rows(g, program.ops[program.by_position()[p]].space, x)  # noqa: E731
    key = lambda p: names[p].partition("['")[2].rstrip("]'")  # noqa: E731
    return (
        [from_rows(g, program.ops[o].space, y) for o, y in zip(program.outputs, results, strict=True)],
        {key(p): user(p, x) for p, x in zip(wrt, gradients, strict=True)},
        {key(p): user(p, x) for p, x in zip(wrt, second, strict=True)},
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_two_derivatives(name: str) -> None:
    arrays, want = expected(name, "typical")
    got = results_and_derivatives(name, "typical", arrays)
    assert len(got[0]) == len(want[0])
    for y, w in zip(got[0], want[0], strict=True):
        np.testing.assert_allclose(y, w, rtol=1e-9, atol=1e-9 * (1 + np.abs(w).max()))
    for found, right in zip(got[1:], want[1:], strict=True):
        for key, w in right.items():
            y = found.get(key, 0)  # an array that the program does not use
            np.testing.assert_allclose(y, w, rtol=1e-9, atol=1e-9 * (1 + np.abs(w).max()), err_msg=key)


def test_every_operator_has_a_definition() -> None:
    defined = {*ELEMENTWISE, *(name[1:] for name in vars(_Rows) if name.startswith("_")), "input"}
    assert set(TABLE) <= defined, set(TABLE) - defined
