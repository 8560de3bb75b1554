"""The table of operators: each fact in it, tried on numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.rgnn.ir.inter import ELEMENTWISE, OPERATORS, UNARY, Builder, OpProgram
from dejax.rgnn.ir.operators import Infinite, Linear
from dejax.rgnn.lowering.xla import Evaluator
from tests.rgnn.evaluate import ELEMENTWISE as DEFINED
from tests.rgnn.evaluate import evaluate
from tests.rgnn.references import graph_of

ATTRS: dict[str, dict[str, Any]] = {
    "cast": {"dtype": "float64"},
    "pow": {"exponent": -1.5},
    "leaky_relu": {"slope": 0.2},
    "step": {"slope": 0.2},
}
GRAPH = graph_of("typical")


def applied(name: str, *xs: float, scale: float = 1.0) -> float:
    """An elementwise operator's result for numbers of one row, each times `scale`."""
    b = Builder("one")
    args = [b.op("input", name=f"x{n}", position=n, space="graph", shape=(1,), dtype="float64") for n in range(len(xs))]
    program: OpProgram = b.build([b.op(name, *args, **ATTRS.get(name, {}))])
    return float(evaluate(program, GRAPH, {n: np.array([[x * scale]]) for n, x in enumerate(xs)})[0][0, 0])


def arguments(name: str) -> list[tuple[float, ...]]:
    """Numbers of both signs, as many as the operator takes."""
    numbers = (-1.7, 0.4, 2.3)
    if OPERATORS[name].kind == "unary":
        return [(x,) for x in numbers]
    return [(x, y) for x in numbers for y in numbers]


def test_every_operator_has_a_form() -> None:
    without = [name for name, o in OPERATORS.items() if o.form is None and not hasattr(Evaluator, f"_{name}")]
    assert without == ["input"]
    assert all(OPERATORS[name].form is not None for name in ELEMENTWISE)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_forms_on_arrays_and_on_tiles_are_the_definition(name: str) -> None:
    operator, attrs = OPERATORS[name], ATTRS.get(name, {})
    count = {"unary": 1, "binary": 2, "ternary": 3}[operator.kind]
    xs = [np.array([[0.7], [2.3], [0.7]], np.float32) * scale for scale in (1.0, 0.6, -1.0)[:count]]
    shape = SimpleNamespace(attr=lambda key: attrs[key])
    want = DEFINED[name](shape, *xs)
    for form in (operator.form, operator.tile or operator.form):
        assert form is not None
        np.testing.assert_allclose(form(*map(jnp.asarray, xs), **attrs), want, rtol=1e-5)


def test_no_gradient_passes_jumps_and_values_without_arguments() -> None:
    without = {name for name, o in OPERATORS.items() if o.derivative is None}
    jumps = {name for name, o in OPERATORS.items() if o.linear is Linear.CONSTANT}
    assert without == jumps | {"stop_gradient", "extremum_share", "input", "const", "count"}


@pytest.mark.parametrize("name", sorted(n for n in ELEMENTWISE if OPERATORS[n].kind != "ternary"))
def test_what_is_said_of_linearity_masks_and_columns_holds(name: str) -> None:
    operator = OPERATORS[name]
    for xs in arguments(name):
        value, twice = applied(name, *xs), applied(name, *xs, scale=2.0)
        if operator.linear in (Linear.MOVES, Linear.SAME_FACTOR, Linear.ADDS):
            assert twice == pytest.approx(2 * value)
        if operator.linear is Linear.CONSTANT:
            assert twice == value
        if operator.columns == "same":
            assert abs(value) == abs(xs[0])
        if operator.columns == "largest":
            assert abs(value) <= 2 * max(map(abs, xs))
        if operator.masks == "made":
            assert value in (0, 1)
    if operator.masks == "kept":
        ones = [xs for xs in ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0)) for xs in (xs[: len(arguments(name)[0])],)]
        assert all(applied(name, *xs) in (0, 1) for xs in ones)


@pytest.mark.parametrize("name", sorted(UNARY))
def test_what_is_said_of_infinity_holds(name: str) -> None:
    """Values and slopes are finite at 0 and far from it unless the table says otherwise."""
    step, near = 1e-300, [applied(name, x) for x in (0.0, -1.0)]
    if OPERATORS[name].infinite is Infinite.NOWHERE:
        assert np.isfinite([*near, applied(name, 1e4), applied(name, -1e4)]).all()
        assert abs(applied(name, step) - applied(name, 0.0)) <= step * 2 or OPERATORS[name].linear is Linear.CONSTANT
    if OPERATORS[name].infinite is Infinite.VALUE:
        assert not np.isfinite(near).all()
