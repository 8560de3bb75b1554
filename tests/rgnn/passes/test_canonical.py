"""The canonical room: two ways of writing one function become one program, with the values that it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Program, Space
from dejax.rgnn.passes import PASSES, run_passes, silent
from dejax.rgnn.passes.canonical import CANONICAL
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.rules import Pat, Rule, Var, rules
from tests.rgnn.evaluate import evaluate
from tests.rgnn.preserved import trace
from tests.rgnn.references import graph_of

K, H, D = 6, 2, 3
COUNTS = Counts(nodes=50, edges=100, source_pairs=60, destination_pairs=60, edge_types=2, node_types=2)
Function = Callable[..., Any]


def by_hand_heads(g: Any, x: Any, w: Any, a: Any) -> Any:
    z = g.src(x) @ g.per_edge_type(w)
    alpha = rgnn.edge_softmax(rgnn.dot(z, g.per_edge_type(a)))
    return g.sum_to_dst(alpha[:, None] * z).reshape(H * D)


def looped_heads(g: Any, x: Any, w: Any, a: Any) -> Any:
    w, a, heads = g.per_edge_type(w), g.per_edge_type(a), []
    for h in range(H):
        z = g.src(x) @ w[h]
        heads.append(g.sum_to_dst(rgnn.edge_softmax(rgnn.dot(z, a[h])) * z))
    return rgnn.concatenate(heads)


def written_out_softmax(g: Any, x: Any, y: Any) -> Any:
    s = (g.src(x) * g.dst(y)).sum(-1)
    p = rgnn.exp(s - g.dst(g.max_to_dst(s)))
    return g.sum_to_dst(p / (g.dst(g.sum_to_dst(p)) + 1e-16) * g.src(x))


def softmax(g: Any, x: Any, y: Any) -> Any:
    return g.sum_to_dst(rgnn.edge_softmax(rgnn.dot(g.src(x), g.dst(y))) * g.src(x))


NODES, SHARED, TYPED = ("N", K), (K, K), ("R", K, K)
# What is written, the form by hand, and the shapes of the arrays.
WAYS: dict[str, tuple[Function, Function, list[tuple]]] = {
    "unit_axes": (
        lambda g, x, y: g.sum_to_dst(rgnn.tanh((g.src(x) * g.dst(y)).sum(keepdims=True)) * g.src(x)),
        lambda g, x, y: g.sum_to_dst(rgnn.tanh(rgnn.dot(g.src(x), g.dst(y))) * g.src(x)),
        [NODES, NODES],
    ),
    "cse": (
        lambda g, x, w: g.sum_to_dst(rgnn.tanh(g.src(x) @ g.per_edge_type(w)) * (g.src(x) @ g.per_edge_type(w))),
        lambda g, x, w: (lambda z: g.sum_to_dst(rgnn.tanh(z) * z))(g.src(x) @ g.per_edge_type(w)),
        [NODES, TYPED],
    ),
    "plain_forms, a softmax": (written_out_softmax, softmax, [NODES, NODES]),
    "plain_forms, powers and neutral elements": (
        lambda g, x: g.sum_to_dst(0 + g.src(x) ** 2 * 1.0),
        lambda g, x: g.sum_to_dst(rgnn.square(g.src(x))),
        [NODES],
    ),
    "stack_heads": (looped_heads, by_hand_heads, [NODES, ("R", H, K, D), ("R", H, D)]),
    "slice_weights": (
        lambda g, x, w: (lambda y: g.sum_to_dst(rgnn.tanh(y[:D]) * y[D:]))(g.src(x) @ g.per_edge_type(w)),
        lambda g, x, w: (lambda w: g.sum_to_dst(rgnn.tanh(g.src(x) @ w[:, :D]) * (g.src(x) @ w[:, D:])))(
            g.per_edge_type(w)
        ),
        [NODES, TYPED],
    ),
    "split_products": (
        lambda g, x, w: g.sum_to_dst(rgnn.tanh(rgnn.concatenate([g.src(x), g.dst(x)]) @ g.shared(w))),
        lambda g, x, w: g.sum_to_dst(rgnn.tanh(g.src(x) @ g.shared(w)[:K] + g.dst(x) @ g.shared(w)[K:])),
        [NODES, (2 * K, K)],
    ),
    "split_rows": (
        lambda g, x, y: g.sum_to_dst(rgnn.square(rgnn.concatenate([g.src(x), g.dst(y)])).sum(-1)),
        lambda g, x, y: g.sum_to_dst((rgnn.square(g.src(x)) + rgnn.square(g.dst(y))).sum(-1)),
        [NODES, NODES],
    ),
    "weight_heads": (
        lambda g, x, w: g.sum_to_dst(rgnn.tanh((g.src(x) @ g.shared(w)).reshape(H, D))),
        lambda g, x, w: g.sum_to_dst(rgnn.tanh(g.src(x) @ g.shared(w).reshape(K, H, D).transpose(1, 0, 2))),
        [NODES, SHARED],
    ),
    "scale_products": (
        lambda g, x, c, w: g.sum_to_dst(rgnn.tanh((g.edge(c)[None] * g.src(x)) @ g.per_edge_type(w))),
        lambda g, x, c, w: g.sum_to_dst(rgnn.tanh((g.src(x) @ g.per_edge_type(w)) * g.edge(c)[None])),
        [NODES, ("E",), TYPED],
    ),
    "combine_products, one row": (
        lambda g, x, w, u: g.sum_to_dst(rgnn.tanh(g.src(x) @ g.per_edge_type(w) + g.src(x) @ g.shared(u))),
        lambda g, x, w, u: g.sum_to_dst(rgnn.tanh(g.src(x) @ (g.per_edge_type(w) + g.shared(u)))),
        [NODES, TYPED, SHARED],
    ),
    "combine_products, one weight": (
        lambda g, x, y, w: g.sum_to_dst(rgnn.tanh(g.src(x) @ g.shared(w) + g.src(y) @ g.shared(w))),
        lambda g, x, y, w: g.sum_to_dst(rgnn.tanh((g.src(x) + g.src(y)) @ g.shared(w))),
        [NODES, NODES, SHARED],
    ),
}


def canonical(program: Program) -> Program:
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


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_writing_one_function_become_one(way: str) -> None:
    written, by_hand, shapes = WAYS[way]
    g, rng = graph_of("typical"), np.random.default_rng(3)
    rows = {"N": g.num_nodes, "E": g.num_edges, "R": g.num_edge_types}
    arrays = [rng.normal(size=[rows.get(side, side) for side in shape]) for shape in shapes]
    arrays = [a.astype(np.float32) for a in arrays]
    programs = [trace(rgnn.program(function), g, *arrays) for function in (written, by_hand)]
    (before, inputs), (hand, _) = programs
    after = canonical(before)
    assert str(before) != str(hand)
    assert str(after) == str(canonical(hand))
    for x, y in zip(evaluate(before, g, inputs), evaluate(after, g, inputs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


def test_each_pass_of_the_room_has_its_case() -> None:
    names = {name for name, _ in CANONICAL}
    assert names - {"dce"} == {way.partition(",")[0] for way in WAYS}
    assert names <= set(PASSES)


# --- the engine of rules ---------------------------------------------------------------------------------------------


def chain(*names: str, also: int = 0) -> Program:
    """Unary operators one after another; `also` is returned, too, if it is not 0."""
    b = Builder("chain")
    value = b.op("input", name="x", position=0, space=str(Space.NODE), shape=(2,), dtype="float32")
    for name in names:
        value = b.op(name, value)
    return b.build([value, also] if also else [value])


def names_of(program: Program) -> list[str]:
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
