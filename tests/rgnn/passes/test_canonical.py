"""The canonical room: two ways of writing one function become one program, with the values that it had."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, OpProgram, Space
from dejax.rgnn.passes import PASSES, run_passes, silent
from dejax.rgnn.passes.canonical import CANONICAL
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.rules import Pat, Rule, Var, rules
from tests.rgnn.evaluate import evaluate
from tests.rgnn.passes.idioms import IDIOMS, WAYS, D, H, Idiom, K
from tests.rgnn.preserved import trace
from tests.rgnn.references import graph_of

COUNTS = Counts(nodes=50, edges=100, source_pairs=60, destination_pairs=60, edge_types=2, node_types=2)
OWN = {
    "unit_axes": Idiom(
        rgnn.program(lambda g, x, y: g.sum_to_dst(rgnn.tanh((g.src(x) * g.dst(y)).sum(keepdims=True)) * g.src(x))),
        rgnn.program(lambda g, x, y: g.sum_to_dst(rgnn.tanh(rgnn.dot(g.src(x), g.dst(y))) * g.src(x))),
        "x[N, K] y[N, K]",
    ),
    "weight_heads": Idiom(
        rgnn.program(lambda g, x, w: g.sum_to_dst(rgnn.tanh((g.src(x) @ g.shared(w)).reshape(H, D)))),
        rgnn.program(lambda g, x, w: g.sum_to_dst(rgnn.tanh(g.src(x) @ g.shared(w).reshape(K, H, D).swapaxes(0, 1)))),
        "x[N, K] w[K, K]",
    ),
}


def canonical(program: OpProgram) -> OpProgram:
    """The program after the room's passes, its operators in an order that only their arguments decide."""
    program = dce(cse(run_passes(program, CANONICAL, COUNTS, frozenset(), silent), COUNTS), COUNTS)
    builder, new = Builder("canonical"), dict[int, int]()

    def add(i: int) -> int:
        if i not in new:
            new[i] = builder.copy(program.ops[i], [add(a) for a in program.ops[i].args])
        return new[i]

    for i in program.inputs:
        add(i)
    return builder.build([add(o) for o in program.outputs])


@pytest.mark.parametrize("name", [*OWN, *itertools.chain(*WAYS.values())])
def test_ways_of_writing_one_function_become_one(name: str) -> None:
    way, g = OWN.get(name) or IDIOMS[name], graph_of("typical")
    arrays = [np.random.default_rng(3).normal(size=shape).astype(np.float32) for shape in way.shapes(g)]
    (before, inputs), (hand, _) = (trace(program, g, *arrays) for program in (way.written, way.by_hand))
    after = canonical(before)
    assert str(before) != str(hand)
    assert str(after) == str(canonical(hand))
    for x, y in zip(evaluate(before, g, inputs), evaluate(after, g, inputs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


def test_heads_that_are_reshaped_again_keep_the_last_shape() -> None:
    layer = rgnn.program(lambda g, x, w: (g.src(x) @ g.per_edge_type(w)).reshape(-1, 1).reshape(1, -1))
    x, w = np.ones((3, 4), np.float32), np.ones((1, 4, 2), np.float32)
    graph = rgnn.RelGraph.from_edges([0, 1], [1, 2], num_nodes=3)
    assert layer(graph, x, w).shape == (2, 1, 2)


def test_each_pass_of_the_room_has_its_case() -> None:
    names = {name for name, _ in CANONICAL}
    assert names - {"dce"} == {*WAYS, *OWN} and names <= set(PASSES)


# --- the engine of rules ---------------------------------------------------------------------------------------------


def chain(*names: str, also: int = 0) -> OpProgram:
    """Unary operators one after another; `also` is returned, too, if it is not 0."""
    b = Builder("chain")
    value = b.op("input", name="x", position=0, space=str(Space.NODE), shape=(2,), dtype="float32")
    for name in names:
        value = b.op(name, value)
    return b.build([value, also] if also else [value])


def names_of(program: OpProgram) -> list[str]:
    return [op.name for op in dce(program, COUNTS).ops]


def test_rules_apply_until_none_matches() -> None:
    twice_negative = rules(Rule(Pat("neg", Pat("neg", Var("x"))), lambda b, m: m.new("x")))
    assert names_of(twice_negative(chain(*["neg"] * 5), COUNTS)) == ["input", "neg"]
    unchanged = chain("neg", "exp", "neg")
    assert twice_negative(unchanged, COUNTS) is unchanged


def test_a_value_that_others_read_does_not_match_once() -> None:
    made = rules(Rule(Pat("neg", Pat("exp", Var("x"), once=True)), lambda b, m: b.op("cos", m.new("x"))))
    assert names_of(made(chain("exp", "neg"), COUNTS)) == ["input", "cos"]
    returned = chain("exp", "neg", also=1)
    assert made(returned, COUNTS) is returned


def test_arguments_that_commute_match_in_either_order_and_a_name_is_one_value() -> None:
    b = Builder("sum")
    x, y = (
        b.op("input", name=n, position=i, space=str(Space.NODE), shape=(2,), dtype="float32")
        for i, n in enumerate("xy")
    )
    b.op("exp", x)
    exp_first, exp_second = b.op("mul", 2, x), b.op("mul", x, 2)
    other, quotient = b.op("mul", 2, y), b.op("div", x, 2)
    program = b.build([exp_first, exp_second, other, quotient])
    pattern = Pat("mul div", Var("x"), Pat("exp", Var("x")))
    made = dce(rules(Rule(pattern, lambda b, m: m.new("x")))(program, COUNTS), COUNTS)
    assert [made.ops[o].name for o in made.outputs] == ["input", "input", "mul", "input"]


def test_rules_that_undo_each_other_are_an_error() -> None:
    there = Rule(Pat("exp", Var("x")), lambda b, m: b.op("log", m.new("x")))
    back = Rule(Pat("log", Var("x")), lambda b, m: b.op("exp", m.new("x")))
    with pytest.raises(RuntimeError, match="the rules still match after 100 sweeps over 'chain'"):
        rules(there, back)(chain("exp"), COUNTS)
