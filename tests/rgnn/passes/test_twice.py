"""Every pass takes what it gives: programs of the operators, the library and the zoo, with each pass run twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn.compiler.execute import counts_of
from dejax.rgnn.ir.inter import OpProgram, verify
from dejax.rgnn.passes import AFTER_BACKWARD, OPTIMISE, Pass, optimise
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.gradients.backward import differentiate
from tests.cases import slow_but
from tests.rgnn.cases import CASES as LIBRARY
from tests.rgnn.cases import Size
from tests.rgnn.contract import make_arrays
from tests.rgnn.layers.test_zoo import drawn
from tests.rgnn.layers.zoo_references import LAYERS
from tests.rgnn.passes.test_unit_axes import CASES as UNIT_AXES
from tests.rgnn.passes.test_unit_axes import WAYS
from tests.rgnn.passes.test_unit_axes import arrays as arrays_by_shape
from tests.rgnn.references import GRAPHS
from tests.rgnn.test_operators import OPERATORS, arrays_of

EDGES = GRAPHS["typical"]
COUNTS = counts_of(EDGES.build())


# These go on where they ended: `merge_gemms` joins a third product with the two that it joined, and `unit_axes` moves
# the reshapes that it left.
GO_ON = {"merge_gemms", "unit_axes"}
Given = tuple[Any, dict[str, np.ndarray]]  # a function (g, arrays), and the arrays


def of_the_zoo(name: str) -> Given:
    layer, arrays = drawn(LAYERS[name], EDGES)
    return lambda g, a: layer.run(g, a, None), arrays


KINDS: dict[str, tuple[Callable[[Any], Given], list]] = {
    "operator": (lambda name: (OPERATORS[name].program, arrays_of(EDGES)), list(OPERATORS)),
    "library": (
        lambda name: (lambda g, a: LIBRARY[name].run(g, a, None), make_arrays(name, EDGES, Size(), "float32")),
        list(LIBRARY),
    ),
    "zoo": (of_the_zoo, list(LAYERS)),
    "unit axes": (lambda c: (lambda g, a: tuple(WAYS[c[0]][0](g, c[1], a)), arrays_by_shape(*c)), UNIT_AXES),
}


def run_twice(program: OpProgram, passes: Sequence[tuple[str, Pass]]) -> OpProgram:
    """The program after the passes; after each one it runs once more, which changes nothing but its order."""
    for name, run in passes:
        after = verify(run(program, COUNTS))
        again = verify(run(after, COUNTS))
        program = after
        if str(again) == str(after):
            continue
        if name in GO_ON:
            assert size(again) <= size(after), f"a second {name} adds work"
        else:
            assert str(clean(again)) == str(clean(after)), f"a second {name} changes the program"
    return program


def size(program: OpProgram) -> int:
    return sum(op.name not in ("reshape", "slice", "concat") for op in clean(program).ops)


def clean(program: OpProgram) -> OpProgram:
    return dce(cse(program, COUNTS), COUNTS)


def check(function: Any, arrays: Any) -> None:
    given = jax.tree.map(lambda a: a.astype(np.float32) if a.dtype.kind == "f" else a, arrays)
    program = run_twice(rgnn.program(function).traced(COUNTS, (given,), {})[0], OPTIMISE)
    verify(optimise(program, COUNTS))
    inputs = (program.ops[i] for i in program.inputs)
    joint = differentiate(program, tuple(op.attr("position") for op in inputs if op.dtype == "float32"))
    run_twice(joint, AFTER_BACKWARD)


# A fourth of each kind; passes that are not idempotent show on many programs.
QUICK = {(kind, name) for kind, (_, names) in KINDS.items() for name in names[::4]}


@pytest.mark.parametrize(
    ("kind", "name"), slow_but(QUICK, [(k, n) for k, (_, names) in KINDS.items() for n in names]), ids=str
)
def test_passes_take_what_they_give(kind: str, name: Any) -> None:
    check(*KINDS[kind][0](name))
