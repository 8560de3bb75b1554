"""The passes one by one: what each does to a tiny program as a golden text, and when it does nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dejax.rgnn import Options, library
from dejax.rgnn.compiler import execute
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, OpProgram, Space, verify
from dejax.rgnn.ir.intra import Fallback, Gemm, Kernels, Traversal, WeightGradient, verify_kernels
from dejax.rgnn.ir.templates import access_by
from dejax.rgnn.passes import (
    AFTER_BACKWARD,
    INFERENCE,
    OPTIMISE,
    PASSES,
    differentiated,
    lower_to_kernels,
    optimise,
    run_passes,
)
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.forms.aggregate import aggregate
from dejax.rgnn.passes.forms.compact import compact
from dejax.rgnn.passes.forms.fold import fold
from dejax.rgnn.passes.forms.hoist import hoist
from dejax.rgnn.passes.forms.merge_gemms import merge_gemms
from dejax.rgnn.passes.forms.reorder import reorder
from dejax.rgnn.passes.gradients.backward import differentiate
from dejax.rgnn.passes.gradients.contract import contract
from dejax.rgnn.passes.gradients.save import Cut, cut
from dejax.rgnn.passes.kernels.fallback import fallback
from dejax.rgnn.passes.kernels.fuse_gemm import fuse_gemm
from dejax.rgnn.passes.kernels.fuse_row_products import fuse_row_products
from dejax.rgnn.passes.kernels.fuse_traversal import fuse_traversal
from dejax.rgnn.passes.kernels.storage import linear_in, storage
from tests.rgnn.cases import Size
from tests.rgnn.contract import make_arrays
from tests.rgnn.references import GRAPHS, graph_of

# Ten edges for each source pair, and for each destination pair: every pass pays.
COUNTS = Counts(
    nodes=50, edges=1000, source_pairs=100, destination_pairs=100, edge_types=4, node_types=2, typed_sources=True
)
# Every edge has a source pair and a destination pair of its own: no pass saves rows.
SPARSE = Counts(nodes=1000, edges=1000, source_pairs=1000, destination_pairs=1000, edge_types=4, node_types=2)


class Tiny(Builder):
    """A builder with methods named as in the front end."""

    def given(self, name: str, space: Space, *shape: int, dtype: str = "float32") -> int:
        position = sum(op.name == "input" for op in self.ops)
        return self.op("input", name=name, position=position, space=str(space), shape=shape, dtype=dtype)

    def node(self, name: str, *shape: int) -> int:
        return self.given(name, Space.NODE, *shape)

    def weight(self, name: str, *shape: int) -> int:
        return self.given(name, Space.EDGE_TYPE, *shape)

    def edge(self, name: str, *shape: int) -> int:
        return self.given(name, Space.EDGE, *shape)

    def src(self, x: int) -> int:
        return self.op("gather", x, via="src")

    def dst(self, x: int) -> int:
        return self.op("gather", x, via="dst")

    def linear(self, x: int, w: int, spec: str = "k,kn->n", via: str = "etype") -> int:
        return self.op("linear", x, w, spec=spec, via=via)

    def sum(self, x: int, via: str = "dst") -> int:
        return self.op("reduce", x, via=via, op="sum")


# Each pass where it runs first, and the programs that show what one does, which have its name.
RUN = dict(reversed((*OPTIMISE, *AFTER_BACKWARD, *INFERENCE)))
SHOWN: dict[str, OpProgram] = {}


def program(name: str) -> Callable[[Callable[[Tiny], int | list[int]]], OpProgram]:
    def make(function: Callable[[Tiny], int | list[int]]) -> OpProgram:
        b = Tiny(name)
        outputs = function(b)
        made = b.build(outputs if isinstance(outputs, list) else [outputs])
        if name.removesuffix("_shared") in RUN:
            SHOWN[name] = made
        return made

    return make


def names(p: OpProgram) -> list[str]:
    return [op.name for op in p.ops]


# --- the programs ----------------------------------------------------------------------------------------------------


@program("cse")
def twice(b: Tiny) -> int:
    x, w = b.node("x", 4), b.weight("w", 4, 3)
    return b.op("add", b.linear(b.src(x), w), b.op("tanh", b.linear(b.src(x), w)))


@program("dce")
def unused(b: Tiny) -> int:
    x, _ = b.node("x", 4), b.weight("never_used", 4)
    y = b.src(x)
    b.op("exp", y)
    return b.sum(y)


@program("reorder")
def dot_after_linear(b: Tiny) -> list[int]:
    x, w, a = b.node("x", 4), b.weight("w", 2, 4, 3), b.weight("a", 2, 3)
    score = b.op("dot", b.linear(b.dst(x), w, "k,hkn->hn"), b.op("gather", a, via="etype"))
    v, u = b.weight("v", 4, 16), b.weight("u", 16, 4)
    return [score, b.linear(b.linear(b.src(x), v), u)]


@program("aggregate")
def scaled_sum(b: Tiny) -> int:
    x, w, e = b.node("x", 4), b.weight("w", 4, 8), b.edge("e")
    return b.sum(b.op("mul", b.linear(b.src(x), w), e))


@program("aggregate_shared")
def sum_through_a_shared_weight(b: Tiny) -> int:
    x, w, e = b.node("x", 4), b.given("w", Space.GRAPH, 4, 8), b.edge("e")
    return b.sum(b.linear(b.op("mul", b.src(x), e), w, via="all"))


@program("split_products")
def products_of_concatenations(b: Tiny) -> list[int]:
    x, e, w, a = b.node("x", 4), b.edge("e", 2), b.given("w", Space.GRAPH, 10, 3), b.weight("a", 8)
    row = b.op("concat", b.src(x), b.dst(x), e, axis=0)
    ends = b.op("concat", b.src(x), b.dst(x), axis=0)
    score = b.op("dot", b.op("gather", a, via="etype"), ends)
    one_end = b.op("concat", b.src(x), b.op("tanh", b.src(x)), axis=0)
    return [b.linear(row, w, via="all"), score, b.linear(one_end, b.weight("u", 8, 3))]


@program("split_rows")
def work_on_concatenated_rows(b: Tiny) -> list[int]:
    x, e, c = b.node("x", 4), b.edge("e", 2), b.edge("c")
    low = b.op("slice", b.src(x), axis=0, start=0, stop=2)
    row = b.op("sub", b.op("concat", low, e, axis=0), b.dst(x))
    return [b.op("sum_features", b.op("square", row), axes=(0,), keepdims=False), b.sum(b.op("mul", row, c)), row]


@program("weight_heads")
def rows_reshaped_to_heads(b: Tiny) -> list[int]:
    x, w, c = b.node("x", 4), b.given("w", Space.GRAPH, 4, 6), b.given("c", Space.GRAPH, 6)
    z = b.op("relu", b.op("add", b.linear(x, w, via="all"), b.op("gather", c, via="all", space="node")))
    heads = [b.op("reshape", end, shape=(2, 3)) for end in (b.src(z), b.dst(z))]
    flat = b.linear(b.src(x), b.weight("v", 4, 6))
    return [b.op("dot", *heads), b.sum(flat), b.sum(b.op("reshape", flat, shape=(3, 2)))]


@program("plain_forms")
def other_spellings(b: Tiny) -> list[int]:
    x, s = b.node("x", 6), b.edge("s")
    z = b.src(x)
    inner = b.op("sum_features", b.op("mul", z, b.dst(x)), axes=(0,), keepdims=False)
    p = b.op("exp", b.op("sub", s, b.dst(b.op("reduce", s, via="dst", op="max"))))
    share = b.op("div", p, b.dst(b.sum(p)))
    heads = b.op("reshape", b.op("mul", b.op("reshape", z, shape=(2, 3)), b.edge("e", 2, 3)), shape=(6,))
    return [b.op("pow", b.op("add", b.const(0.0, "float32", Space.EDGE), inner), exponent=2.0), share, b.sum(heads)]


@program("stack_heads")
def heads_one_by_one(b: Tiny) -> list[int]:
    x, w, q, e = b.node("x", 4), b.weight("w", 2, 4, 3), b.node("q", 6), b.edge("e", 3)
    heads, other = [], []
    for i in range(2):
        weight = b.op("reshape", b.op("slice", w, axis=0, start=i, stop=i + 1), shape=(4, 3))
        z, key = b.linear(b.src(x), weight), b.dst(b.op("slice", q, axis=0, start=3 * i, stop=3 * i + 3))
        heads.append(b.sum(b.op("mul", b.op("softmax", b.op("dot", z, key), via="dst"), z)))
        other.append(
            b.sum(b.op("mul" if i else "add", b.src(b.op("slice", q, axis=0, start=3 * i, stop=3 * i + 3)), e))
        )
    return [b.op("concat", *heads, axis=0), b.op("concat", *other, axis=0)]


@program("slice_weights")
def parts_of_products(b: Tiny) -> list[int]:
    x, w, c = b.node("x", 4), b.given("w", Space.GRAPH, 4, 6), b.given("c", Space.GRAPH, 6)
    y = b.src(b.op("relu", b.op("add", b.linear(x, w, via="all"), b.op("gather", c, via="all", space="node"))))
    gate, row = (b.op("slice", y, axis=0, start=3 * i, stop=3 * i + 3) for i in range(2))
    whole = b.linear(b.src(x), b.weight("v", 4, 6))
    return [b.sum(b.op("mul", gate, row)), b.sum(b.op("slice", whole, axis=0, start=0, stop=2)), b.sum(whole)]


@program("scale_products")
def products_of_scaled_rows(b: Tiny) -> list[int]:
    x, e, c = b.node("x", 4), b.edge("e"), b.weight("c")
    typed = b.op("mul", b.op("gather", c, via="etype"), b.src(x))
    by_feature = b.linear(b.op("mul", b.src(x), b.edge("f", 4)), b.weight("u", 4, 3))
    return [b.linear(b.op("div", b.src(x), e), b.weight("w", 4, 3)), b.linear(typed, b.weight("v", 4, 3)), by_feature]


@program("combine_products")
def added_products(b: Tiny) -> list[int]:
    x, y, w = b.node("x", 4), b.node("y", 4), b.weight("w", 4, 3)
    u, v, row = b.given("u", Space.GRAPH, 4, 3), b.weight("v", 4, 3), b.src(x)
    rows = b.op("sub", b.linear(row, w), b.linear(row, u, via="all"))
    ends = b.op("add", b.linear(b.src(x), v), b.linear(b.dst(y), v))  # stays
    return [rows, b.op("add", b.linear(b.src(x), v), b.linear(b.src(y), v)), ends]


@program("split_sums")
def products_of_sums(b: Tiny) -> list[int]:
    x, y, r = b.node("x", 4), b.node("y", 4), b.weight("r", 4)
    w = b.given("w", Space.GRAPH, 4, 3)
    ends = b.linear(b.op("add", b.src(x), b.dst(x)), w, via="all")
    relation = b.linear(b.op("add", b.src(x), b.op("gather", r, via="etype")), w, via="all")
    close = b.linear(b.op("sub", b.src(x), b.op("gather", r, via="etype")), w, via="all")  # stays, as the next one
    edges = b.linear(b.op("add", b.src(y), b.edge("e", 4)), w, via="all")
    return [ends, relation, close, edges]


@program("unit_axes")
def scored_by_one_column(b: Tiny) -> list[int]:
    x, a = b.given("x", Space.EDGE, 2, 4), b.weight("a", 2, 4, 1)
    score = b.op("add", b.linear(x, a, "hk,hkn->hn"), b.op("sum_features", x, axes=(1,), keepdims=True))
    share = b.op("softmax", b.op("leaky_relu", score, slope=0.2), via="dst")
    return [b.sum(b.op("mul", share, x)), share]


@program("fold")
def keys(b: Tiny) -> list[int]:
    x, v = b.node("x", 4), b.given("v", Space.NODE_TYPE, 2, 4, 3)
    w = b.weight("w", 2, 3, 3)
    key = b.linear(x, v, "k,hkn->hn", via="ntype")
    return [b.linear(b.src(key), w, "hk,hkn->hn")]


@program("merge_gemms")
def keys_and_messages(b: Tiny) -> int:
    x, u, v, c = b.node("x", 4), b.weight("u", 2, 4, 8), b.weight("v", 2, 4, 8), b.weight("c", 2, 8)
    row, bias = b.src(x), b.op("gather", c, via="etype")
    key = b.op("add", b.linear(row, u, "k,hkn->hn"), bias)
    message = b.op("add", b.linear(row, v, "k,hkn->hn"), bias)
    return b.sum(b.op("dot", key, message))


@program("concat_parts")
def two_halves(b: Tiny) -> int:
    x, y = b.given("x", Space.NODE, 2, 3), b.given("y", Space.NODE, 2, 3)
    low, high = b.op("pad", x, axis=0, before=0, after=2), b.op("pad", y, axis=0, before=2, after=0)
    return b.op("add", high, low)


@program("combine_node_products")
def gradients_of_both_ends(b: Tiny) -> list[int]:
    """Sums of two and of three products become one; a product that another operator reads, too, stays."""
    x, y, z, w = b.node("x", 3), b.node("y", 3), b.node("z", 3), b.given("w", Space.GRAPH, 4, 3)
    rows, kept = b.node("rows", 4), b.node("kept", 3)
    product = lambda a: b.op("linear", a, w, spec="n,kn->k", via="all")  # noqa: E731
    weights = [b.op("outer", rows, a, spec="k,n->kn", via="all", dtype="float32") for a in (x, y)]
    three = b.op("add", b.op("add", product(x), product(y)), product(z))
    alone = product(kept)
    return [three, b.op("add", *weights), b.op("add", alone, product(x)), alone]


@program("compact")
def by_pair(b: Tiny) -> list[int]:
    x, w, c = b.node("x", 4), b.weight("w", 4, 3), b.weight("c", 3)
    z = b.linear(b.src(x), w)
    score = b.op("dot", z, b.op("gather", c, via="etype"))
    return [b.sum(z), b.op("add", score, b.op("tanh", b.op("dot", b.dst(x), b.dst(x))))]


@program("softmax")
def attention(b: Tiny) -> int:
    s, x = b.edge("s"), b.node("x", 4)
    return b.sum(b.op("mul", b.op("softmax", s, via="dst"), b.src(x)))


@program("hoist")
def mean(b: Tiny) -> int:
    x = b.node("x", 4)
    count = b.op("count", via="dst", dtype="float32")
    return b.sum(b.op("div", b.src(x), b.dst(count)))


@program("reuse_rows")
def aggregations_of_one_message(b: Tiny) -> list[int]:
    """Sums of a row and of its square, and the largest of its negative; a row that only one sum reads stays."""
    x, y = b.node("x", 8), b.node("y", 8)
    alone = b.src(b.op("exp", y))
    opposite = b.op("sub", b.const(0.0, "float32", Space.NODE), x)
    sums = [b.sum(b.src(x)), b.sum(b.src(b.op("square", x))), b.sum(alone)]
    return [*sums, b.op("reduce", b.src(opposite), via="dst", op="max")]


@program("scores_on_edges")
def score_by_both_pairs(b: Tiny) -> int:
    x, w, a, c = b.node("x", 64), b.weight("w", 64, 64), b.weight("a", 64), b.weight("c", 64)
    z = b.linear(b.op("gather", x, via="source_pair.node"), w, via="source_pair.etype")
    s = b.linear(z, a, "k,k->", "source_pair.etype")
    t = b.linear(b.op("gather", x, via="destination_pair.node"), c, "k,k->", "destination_pair.etype")
    score = b.op("add", b.op("gather", s, via="source_pair"), b.op("gather", t, via="destination_pair"))
    weight = b.op("reshape", score, shape=(1,))
    return b.sum(b.op("mul", weight, b.op("gather", z, via="source_pair")))


@program("hoist_shared")
def sum_of_a_shared_vector(b: Tiny) -> int:
    s, a = b.edge("s"), b.given("a", Space.GRAPH, 4)
    return b.sum(b.op("mul", b.op("reshape", s, shape=(1,)), b.op("gather", a, via="all", space="edge")))


@program("sum_by_node")
def gradient_of_a_shared_vector(b: Tiny) -> list[int]:
    """Some sums stay: those of rows that are inputs, of rows of nodes, and of a result."""
    x, y, s, e = b.node("x", 4), b.node("y", 4), b.edge("s"), b.edge("e", 4)
    row = b.op("tanh", b.op("add", b.src(x), b.dst(y)))
    scaled = b.op("mul", b.op("reshape", s, shape=(1,)), row)
    half = b.op("cast", scaled, dtype="bfloat16")
    to_source = b.sum(b.op("square", b.dst(y)), "src")
    return [b.sum(row, "src"), to_source, *(b.sum(v, "all") for v in (scaled, half, e, x)), b.sum(b.dst(y), "all")]


@program("contract")
def inner_product_of_a_sum(b: Tiny) -> list[int]:
    x, y, c = b.node("x", 4), b.node("y", 4), b.edge("c")
    row = b.src(x)
    total = b.sum(b.op("mul", b.op("reshape", c, shape=(1,)), row))
    return [total, b.sum(b.op("mul", c, b.op("dot", b.dst(y), row)))]


@program("backward")
def message_passing(b: Tiny) -> int:
    x, w = b.node("x", 4), b.weight("w", 4, 3)
    return b.op("tanh", b.sum(b.linear(b.src(x), w)))


@program("gemm")
def products(b: Tiny) -> list[int]:
    x, w = b.node("x", 4), b.weight("w", 4, 3)
    z = b.op("relu", b.linear(b.src(x), w))
    return [z, b.op("outer", b.src(x), z, spec="k,n->kn", via="etype", dtype="float32")]


@program("traversal")
def attention_and_epilogue(b: Tiny) -> int:
    s, z, bias = b.edge("s"), b.edge("z", 4), b.given("b", Space.GRAPH, 4)
    score = b.op("leaky_relu", s, slope=0.2)
    y = b.sum(b.op("mul", b.op("softmax", score, via="dst"), z))
    return b.op("tanh", b.op("add", y, b.lift(bias, Space.NODE)))


@program("share_scalars")
def gradients_of_scores(b: Tiny) -> list[int]:
    """Gradients of a sum of values weighted by keys times queries: by destination of queries, by source of the rest."""
    rows, q, dy = b.node("rows", 2, 8), b.node("q", 1, 8), b.node("dy", 1, 8)
    key, value = (b.src(b.op("slice", rows, axis=0, start=i, stop=i + 1)) for i in (0, 1))
    score, change = b.op("dot", key, b.dst(q)), b.op("dot", b.dst(dy), value)
    by = lambda number, row: b.op("mul", b.op("reshape", number, shape=(1, 1)), row)  # noqa: E731
    to_queries = b.sum(by(change, key))
    return [to_queries, b.sum(by(change, b.dst(q)), "src"), b.sum(by(score, b.dst(dy)), "src")]


@program("fallback")
def what_no_template_does(b: Tiny) -> int:
    x, w, v = b.node("x", 4), b.weight("w", 4, 3), b.given("v", Space.GRAPH, 3, 2)
    y = b.sum(b.linear(b.src(x), w))
    return b.op("erf", b.linear(y, v, via="all"))


@program("storage")
def products_of_products(b: Tiny) -> list[int]:
    x, w = b.node("x", 16), b.weight("w", 16, 16)
    z = b.linear(b.src(x), w)
    total = b.sum(b.linear(z, w))
    return [total, b.linear(b.src(total), w)]


# --- golden texts ----------------------------------------------------------------------------------------------------

Golden = Callable[[str, str], None]


def before_after(before: object, *stages: tuple[str, object]) -> str:
    return "\n\n".join([str(before), *(f"== {title}\n{text}" for title, text in stages)])


@pytest.mark.parametrize("name", SHOWN)
def test_golden(name: str, golden: Golden) -> None:
    before, run = SHOWN[name], RUN[name.removesuffix("_shared")]
    after = verify(run(before, COUNTS))
    assert str(after) != str(before)
    golden(f"pass_{name}.txt", before_after(before, (f"after {name}", after)))
    # A second run changes nothing.
    again = dce(cse(run(dce(cse(after, COUNTS), COUNTS), COUNTS), COUNTS), COUNTS)
    if not name.startswith("hoist"):
        assert str(again) == str(dce(cse(after, COUNTS), COUNTS))


def test_golden_backward(golden: Golden) -> None:
    joint = differentiate(message_passing, wrt=(0, 1))
    golden("pass_backward.txt", before_after(message_passing, ("after backward, gradients of x and w", joint)))
    assert [joint.ops[o].type for o in joint.outputs[1:]] == [
        message_passing.ops[i].type for i in message_passing.inputs
    ]


def test_golden_cut(golden: Golden) -> None:
    """The saved and the recomputed values; with the pass off, everything is saved."""
    joint = dce(cse(differentiate(message_passing, wrt=(0, 1)), COUNTS), COUNTS)
    stages = []
    for title, save_all in (("recompute", False), ("recompute off", True)):
        halves = cut(joint, 2, 1, COUNTS, save_all=save_all)
        stages += [
            (f"{title}: forward, the output and what is saved", halves.forward),
            (f"{title}: backward", halves.backward),
        ]
        assert halves.num_saved == len(halves.forward.outputs) - 1
        assert halves.needed == (0, 1)
    golden("pass_recompute.txt", before_after(joint, *stages))


@program("rounded")
def vectors_in_two_traversals(b: Tiny) -> list[int]:
    x, c, d = b.node("x", 64), b.weight("c", 64), b.weight("d", 64)
    vector, other, row = b.op("gather", c, via="etype"), b.op("gather", d, via="etype"), b.dst(x)
    score = b.op("dot", b.op("add", vector, other), row)
    return [b.sum(score), b.sum(b.op("mul", vector, b.src(x)), "src")]


def test_rows_are_rounded_for_inner_products_alone() -> None:
    """A vector that another loop multiplies rows by is read unrounded by all loops."""
    kernels = fallback(fuse_traversal(Kernels(vectors_in_two_traversals), COUNTS))
    assert sum(isinstance(i, Traversal) for i in kernels.instances) == 2
    ops = vectors_in_two_traversals.ops
    found = storage(kernels, inference=True).read_row_scaled
    assert {(ops[ops[v].args[0]].attr("name"), ops[v].attr("via")) for v in found} == {("d", "etype"), ("x", "dst")}
    assert storage(kernels).read_row_scaled == frozenset()


def test_golden_gemm(golden: Golden) -> None:
    golden("pass_gemm.txt", before_after(products, ("gemm instances", fuse_gemm(Kernels(products), COUNTS))))


def test_golden_traversal(golden: Golden) -> None:
    late = run_passes(attention_and_epilogue, AFTER_BACKWARD, COUNTS, frozenset(), lambda *_: None)
    golden("pass_traversal.txt", before_after(late, ("traversal instances", fuse_traversal(Kernels(late), COUNTS))))


def test_golden_share_scalars(golden: Golden) -> None:
    each, led = (fuse_traversal(Kernels(gradients_of_scores), COUNTS, sharing=sharing) for sharing in (False, True))
    golden(
        "pass_share_scalars.txt",
        before_after(gradients_of_scores, ("each loop for itself", each), ("one loop stores scalars", led)),
    )


def test_golden_fallback(golden: Golden) -> None:
    fused = fuse_traversal(fuse_gemm(Kernels(what_no_template_does), COUNTS), COUNTS)
    stages = [
        ("in order, with the rest left to XLA", fallback(fused)),
        ("one operator each", fallback(fused, merge=False)),
    ]
    golden("pass_fallback.txt", before_after(what_no_template_does, ("instances", fused), *stages))


@program("row_products")
def gradients_of_shared_weights(b: Tiny) -> list[int]:
    """Two weights and a bias meet the same rows, and a third weight follows from the first one's gradient."""
    x, z, dy = b.node("x", 4), b.node("z", 6), b.node("dy", 3)
    of = lambda left, right: b.op("outer", left, right, spec="k,n->kn", via="all", dtype="float32")  # noqa: E731
    first = of(x, dy)
    after = b.op("linear", dy, first, spec="n,kn->k", via="all")
    scaled = b.op("outer", x, b.node("s"), spec="k,->k", via="all", dtype="float32")
    return [first, of(z, dy), b.sum(dy, "all"), of(after, dy), scaled]


def test_golden_row_products(golden: Golden) -> None:
    """What follows from a result is an instance of its own; rows times scalars are left to XLA."""
    fused = fuse_row_products(Kernels(gradients_of_shared_weights))
    golden("pass_row_products.txt", before_after(gradients_of_shared_weights, ("instances", fallback(fused))))
    first, second = fused.instances
    assert len(first.xs) == 2 and first.total is not None and second.total is None


def test_golden_storage(golden: Golden) -> None:
    """Rows between kernels are stored as row-scaled float16, outputs only if they are packed."""
    fused = fallback(fuse_traversal(fuse_gemm(Kernels(products_of_products), COUNTS), COUNTS))
    golden(
        "pass_storage.txt",
        before_after(
            products_of_products,
            ("instances", storage(fused)),
            ("output 1 may be, too", storage(fused, row_scaled_outputs=(1,))),
        ),
    )
    assert fused.program.outputs[0] not in storage(fused, row_scaled_outputs=(1,)).row_scaled


def test_every_pass_has_a_golden_text() -> None:
    others = {"backward", "recompute", "gemm", "row_products", "traversal", "share_scalars", "fallback", "storage"}
    assert {name.removesuffix("_shared") for name in SHOWN} | others == set(PASSES)


def test_vectors_of_types_may_be_computed() -> None:
    """A loop over edges loads them: it does not compute rows of another space for each edge."""
    b = Tiny("computed")
    vector = b.op("exp", b.weight("a", 4))
    score = b.linear(b.src(b.node("x", 4)), vector, "k,k->")
    kernels = lower_to_kernels(b.build([b.sum(score)]), COUNTS)
    (made,) = (i for i in kernels.instances if vector in i.writes)
    assert isinstance(made, Fallback) and any(isinstance(i, Traversal) and vector in i.reads for i in kernels.instances)


def test_products_that_are_multiplied_again_merge_while_the_cache_has_both() -> None:
    b = Tiny("twice")
    x, w = b.node("x", 4), b.weight("w", 2, 8, 8)
    u, v = (b.given(name, Space.NODE_TYPE, 2, 4, 8) for name in "uv")
    key, query = (b.linear(x, a, "k,hkn->hn", via="ntype") for a in (u, v))
    score = b.op("dot", b.linear(b.src(key), w, "hk,hkn->hn"), b.op("gather", query, via="dst"))
    program = b.build([b.sum(score)])
    found = [
        names(merge_gemms(program, replace(COUNTS, nodes=nodes))).count("linear") for nodes in (10_000, 10_000_000)
    ]
    assert found == [2, 3]


def test_parts_are_read_and_written_where_they_are() -> None:
    """Keys and messages are read from one array, and their gradients written to one, as row-scaled float16."""
    pairs = Counts(nodes=50, edges=1000, source_pairs=90, destination_pairs=90, edge_types=8, node_types=3)
    joint = differentiate(dce(merge_gemms(compact(keys_and_messages, pairs), pairs), pairs), wrt=(0, 1, 2, 3))
    late = run_passes(joint, AFTER_BACKWARD, pairs, frozenset(), lambda *_: None)
    kernels = storage(fallback(fuse_traversal(fuse_gemm(Kernels(late), COUNTS), COUNTS)))
    loops = [i for i in kernels.instances if isinstance(i, Traversal)]
    read = {o.part for t in loops for o in t.operands}
    assert {(0, 2), (2, 2)} <= read
    (written,) = [v for t in loops for v in t.row_outputs if late.ops[v].name == "concat"]
    assert written in kernels.row_scaled
    assert not any(
        late.ops[i].name in ("slice", "pad")
        for f in kernels.instances
        if isinstance(f, Fallback)
        for i in f.ops
        if late.ops[i].space == Space.SOURCE_PAIR
    )


# --- decisions -------------------------------------------------------------------------------------------------------


def read_in_place(b: Tiny) -> int:
    """The kernel that applies the activation reads the first product where it is."""
    x, u, v = b.node("x", 4), b.weight("u", 2, 4, 3), b.weight("v", 2, 4, 3)
    row = b.src(x)
    first, second = (b.linear(row, w, "k,hkn->hn") for w in (u, v))
    return b.sum(b.op("mul", b.op("relu", first), second))


def product_that_others_read(b: Tiny) -> list[int]:
    z = b.linear(b.src(b.node("x", 4)), b.weight("w", 4, 8))
    return [b.sum(z), b.op("tanh", z)]


def scaled_by_feature(b: Tiny) -> int:
    """A scalar for each feature does not commute with the weight."""
    return b.sum(b.op("mul", b.linear(b.src(b.node("x", 4)), b.weight("w", 4, 8)), b.edge("e", 8)))


def narrow_between(b: Tiny) -> int:
    """(x V) U with an inner width of 1; with a width of 16, as in `dot_after_linear`, it becomes x (V U)."""
    x, v, u = b.node("x", 4), b.weight("v", 4, 1), b.weight("u", 1, 4)
    return b.linear(b.linear(b.src(x), v), u)


def keys_that_others_read(b: Tiny) -> list[int]:
    x, v, w = b.node("x", 4), b.given("v", Space.NODE_TYPE, 4, 3), b.weight("w", 3, 3)
    key = b.linear(x, v, via="ntype")
    return [b.linear(b.src(key), w), key]


# Programs that a pass leaves as they are.
UNCHANGED: dict[str, tuple[Callable[[OpProgram, Counts], OpProgram], OpProgram, Counts]] = {
    "merge_gemms, read in place": (merge_gemms, program("p")(read_in_place), COUNTS),
    "aggregate, no row is spared": (aggregate, scaled_sum, SPARSE),
    "aggregate, others read the product": (aggregate, program("p")(product_that_others_read), COUNTS),
    "aggregate, a factor of the features": (aggregate, program("p")(scaled_by_feature), COUNTS),
    "reorder, more work": (reorder, program("p")(narrow_between), COUNTS),
    "fold, others read the keys": (fold, program("p")(keys_that_others_read), COUNTS),
    "fold, sources of several types": (fold, keys, replace(COUNTS, typed_sources=False)),
    "fold, the product of weights is more work": (fold, keys, replace(COUNTS, nodes=1, edge_types=1000)),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_programs_that_a_pass_leaves_as_they_are(case: str) -> None:
    run, before, counts = UNCHANGED[case]
    assert str(run(before, counts)) == str(before)


def test_aggregation_and_reordering_where_they_are_less_work() -> None:
    assert names(aggregate(scaled_sum, COUNTS)).count("reduce") == 2
    assert any(op.attr("via") == "self" for op in reorder(dot_after_linear, COUNTS).ops)


def test_no_aggregation_past_a_factor_that_makes_more_heads() -> None:
    """One head times a scalar for each of three heads: the product is wider than the weight's result."""

    @program("heads")
    def heads(b: Tiny) -> int:
        x, w, e = b.node("x", 1, 4), b.weight("w", 1, 4, 8), b.edge("e", 3, 1)
        return b.sum(b.op("mul", b.linear(b.src(x), w, "hk,hkn->hn"), e))

    assert verify(aggregate(heads, COUNTS)).ops[-1].shape == (3, 8)


def test_no_contraction_with_scalars_for_other_axes() -> None:
    """With the inner products c_e is a scalar for each head, in the sum one for each feature: not the same sum."""

    def sums(shape: tuple[int, int]) -> OpProgram:
        @program("axes")
        def axes(b: Tiny) -> list[int]:
            x, y, c = b.node("x", 3, 3), b.node("y", 3, 3), b.edge("c", 3)
            row = b.src(x)
            total = b.sum(b.op("mul", b.op("reshape", c, shape=shape), row))
            return [total, b.sum(b.op("mul", c, b.op("dot", b.dst(y), row)))]

        return axes

    assert str(contract(sums((1, 3)), COUNTS)) == str(sums((1, 3)))
    assert names(contract(sums((3, 1)), COUNTS))[-2:] == ["mul", "sum_features"]


def test_compaction_where_it_spares_rows() -> None:
    spaces = lambda p: {op.space for op in p.ops if op.name == "linear"}  # noqa: E731
    assert spaces(compact(by_pair, COUNTS)) == {Space.SOURCE_PAIR}
    assert spaces(compact(by_pair, SPARSE)) == {Space.EDGE}


def test_no_compaction_of_functions_that_can_be_infinite() -> None:
    """For a node that no edge reads, backward would multiply 0 by infinity."""

    @program("partial")
    def partial(b: Tiny) -> int:
        return b.sum(b.op("log", b.op("abs", b.src(b.node("x", 4)))))

    spaces = {op.name: op.space for op in compact(partial, COUNTS).ops}
    assert spaces["abs"] == Space.NODE and spaces["log"] == Space.EDGE


def test_no_reordering_of_a_product_that_others_read() -> None:
    @program("others")
    def others(b: Tiny) -> list[int]:
        x, w, a = b.node("x", 4), b.weight("w", 4, 3), b.weight("a", 3)
        z = b.linear(b.src(x), w)
        return [b.op("dot", z, b.op("gather", a, via="etype")), b.sum(z)]

    after = reorder(others, COUNTS)
    # Either way the inner product becomes one with a vector by type, but x W stays as it is.
    assert not any(op.attr("via") == "self" for op in after.ops)


def scaled_scores(b: Tiny, *, heads: int = 2, width: int = 3, kept: bool = False) -> list[int]:
    """((x W_r) . y) c_r on edges, by head."""
    x, y = b.node("x", 4), b.node("y", heads, width)
    w, c = b.weight("w", heads, 4, width), b.weight("c", heads)
    z = b.op("linear", b.src(x), w, spec="k,hkn->hn", via="etype")
    score = b.op("dot", z, b.op("gather", y, via="dst"))
    found = b.op("reduce", b.op("mul", b.op("gather", c, via="etype"), score), via="dst", op="sum")
    return [found, b.op("reduce", z, via="dst", op="sum")] if kept else [found]


def test_a_scalar_by_type_is_multiplied_into_the_weight_of_a_score() -> None:
    after = dce(reorder(program("scaled")(scaled_scores), COUNTS), COUNTS)
    scaled = next(op for op in after.ops if op.name == "mul")
    assert scaled.space == Space.EDGE_TYPE and scaled.shape == (2, 4, 3)
    assert not any(op.name == "gather" and op.attr("via") == "etype" for op in after.ops)


@pytest.mark.parametrize("why", ["the product is read elsewhere, too", "few edges for such weights"])
def test_a_scalar_by_type_is_not_multiplied_into_a_weight(why: str) -> None:
    before = program("scaled")(lambda b: scaled_scores(b, width=64 if "few" in why else 3, kept="read" in why))
    after = dce(reorder(before, replace(COUNTS, edges=10) if "few" in why else COUNTS), COUNTS)
    assert not any(op.name == "mul" and op.space == Space.EDGE_TYPE for op in after.ops)


@pytest.mark.parametrize(("loop", "via", "inner"), [
    ("source_pair", "etype", "source_pair.etype"),
    ("source_pair", "src", "source_pair.node"),
    ("destination_pair", "dst", "destination_pair.node"),
])  # fmt: skip
def test_a_row_that_all_entries_of_a_segment_read_is_read_once(loop: str, via: str, inner: str) -> None:
    assert access_by(via, loop) == ("row_indexed", inner)
    assert access_by(via, "dst" if via != "dst" else "src") == ("gathered", via)


def hgt_training(
    edges: int,
    heads: int,
    *disable: str,
    model: str = "hgt",
    degree: int = 10,
) -> tuple[Cut, Kernels]:
    """The halves of a training step of HGT, or another model, on so many edges, and the kernels of the second."""
    counts = Counts(edges // degree, edges, edges // 9, edges // 5, 4, 4, typed_sources=True)
    size = Size(8 * heads, 8, heads)
    arrays = {k: a.astype("float32") for k, a in make_arrays(model, GRAPHS["typed"], size, "float32").items()}
    layer = getattr(library, model)
    task, _, _ = layer._prepare(
        graph_of("typed"), Options(disable=disable, backend="pallas", precision="tf32"), (arrays.pop("x"), arrays), {}
    )
    task = replace(task, counts=counts)
    halves = execute.training_cut(task, execute.differentiable_positions(task))
    return halves, execute.inference_kernels(execute.CompileTask(halves.backward, counts, task.options, raw=False))


@pytest.mark.parametrize(("edges", "kept"), [(1_000_000, True), (100_000_000, False)])
def test_scores_of_many_edges_are_recomputed(edges: int, kept: bool) -> None:
    """The loop over destinations reads keys and queries anyway, so the forward pass writes no score for it."""
    halves, kernels = hgt_training(edges, 2)
    assert any(halves.forward.ops[v].space == Space.EDGE for v in halves.forward.outputs) == kept
    loops = [t for t in kernels.instances if isinstance(t, Traversal) and t.space == Space.EDGE]
    dots = [kernels.program.ops[i].name for t in loops for i in t.body].count("dot")
    assert dots == (0 if kept else 1)


@pytest.mark.parametrize("heads", [1, 4])
def test_one_traversal_of_attention_stores_per_edge_scalars_for_the_others(heads: int) -> None:
    """HGT's loop over destinations loads rows of keys and messages; the loop over source pairs two scalars a head."""
    _, kernels = hgt_training(60_000_000, heads)
    by_destination, by_pair = (t for t in kernels.instances if isinstance(t, Traversal) and t.space == Space.EDGE)
    ops = kernels.program.ops
    assert (by_destination.via, by_pair.via) == ("dst", "source_pair")
    assert len(by_destination.entry_outputs) == 2 and not by_pair.entry_outputs
    assert {ops[i].name for i in by_pair.body} == {"reshape", "mul"}
    by_entry = [o.value for o in by_pair.operands if o.access == "dense"]
    assert by_entry == list(by_destination.entry_outputs) and all(ops[v].shape == (heads,) for v in by_entry)
    assert {o.via for o in by_pair.operands if o.access != "dense"} == {"dst"} and len(by_pair.operands) == 4
    _, apart = hgt_training(60_000_000, heads, "share_scalars")
    assert [t.via for t in apart.instances if isinstance(t, Traversal) and t.space != Space.NODE] == [
        "source_pair", "dst", "source_pair.node",
    ]  # fmt: skip


@pytest.mark.parametrize("disable", [(), ("share_scalars",)], ids=["shared", "not"])
def test_keys_and_messages_are_free_before_their_gradients_are_written(disable: tuple[str, ...]) -> None:
    """Only the loop over destinations reads both, so the peak of memory does not hold them and their gradients."""
    _, kernels = hgt_training(60_000_000, 4, *disable)
    first, second = (t for t in kernels.instances if isinstance(t, Traversal) and t.space == Space.EDGE)
    (rows,) = (i for i in kernels.program.inputs if kernels.program.ops[i].space == Space.SOURCE_PAIR)
    assert rows in first.reads and (rows in second.reads) == bool(disable)


def test_gradients_of_nodes_are_computed_by_a_kernel_and_stored_as_float16() -> None:
    """HGT's gradients of its activation, and a copy of the gradients that RGAT is given; the inner products with both
    cancel against those of the loop over edges."""
    for model in ("hgt", "rgat"):
        _, kernels = hgt_training(60_000_000, 4, model=model)
        check_gradients_of_nodes(kernels)


def check_gradients_of_nodes(kernels: Kernels) -> None:
    ops = kernels.program.ops
    (made,) = (t for t in kernels.instances if isinstance(t, Traversal) and t.space == Space.NODE)
    (rows,) = kernels.row_scaled.intersection(made.entry_outputs)
    (total,) = (v for v in made.body if ops[v].name == "sum_features" and rows in ops[ops[v].args[0]].args)
    (loop,) = (t for t in kernels.instances if isinstance(t, Traversal) and t.via == "source_pair")
    assert rows in {o.value for o in loop.operands if o.access == "gathered"}
    (compared,) = (
        t for t in kernels.instances if isinstance(t, Traversal) and any(ops[i].name == "sub" for i in t.body)
    )
    read = {o.value for o in compared.operands}
    assert rows in read and any(total in (v, *ops[v].args) for v in read.intersection(made.entry_outputs))


@pytest.mark.parametrize(("edges", "degree", "disable", "copied"), [
    (60_000_000, 10, (), True),
    (60_000_000, 5, (), False),  # rows are not read often enough
    (60_000_000, 10, ("storage",), False),
    (600_000, 10, (), False),  # or come from the cache
])  # fmt: skip
def test_gradients_are_copied_where_traversals_read_them_often(
    edges: int, degree: int, disable: tuple[str, ...], copied: bool
) -> None:
    _, kernels = hgt_training(edges, 4, *disable, model="rgat", degree=degree)
    made = [t for t in kernels.instances if isinstance(t, Traversal) and t.space == Space.NODE]
    assert len(made) == copied
    for t in made:
        (wide,) = (v for v in t.entry_outputs if kernels.program.ops[v].width >= 16)
        assert wide in kernels.row_scaled


@pytest.mark.parametrize(("nodes", "heads", "forward", "backward"), [(100, 1, 0, 0), (100, 4, 1, 1), (10**7, 1, 1, 0)])
def test_a_few_vectors_by_type_are_a_narrow_product(nodes: int, heads: int, forward: int, backward: int) -> None:
    """RGAT's scores of destinations with many heads, or where rows of nodes come from memory, and their gradient."""
    counts = replace(COUNTS, nodes=nodes)
    size = Size(8, 4, heads)
    arrays = {k: a.astype("float32") for k, a in make_arrays("rgat", GRAPHS["typical"], size, "float32").items()}
    task, _, _ = library.rgat._prepare(graph_of("typical"), Options(), (arrays.pop("x"), arrays), {})
    task = replace(task, counts=counts)
    _, *halves = execute.training_tasks(task, execute.differentiable_positions(task))
    for row_scaled, expected in zip(halves, (forward, backward), strict=True):
        kernels = execute.inference_kernels(row_scaled)
        narrow = [g for g in kernels.instances if isinstance(g, Gemm) and g.via == "destination_pair.etype"]
        assert len(narrow) == expected


def test_scores_are_computed_in_the_epilogue_of_a_gemm() -> None:
    """Heads lie side by side in a row of a tile, which can be cut where all widths are powers of two."""
    for heads, width, made in ((1, 3, True), (2, 3, False), (2, 4, True), (3, 4, False)):

        @program("scores")
        def scores(b: Tiny, heads: int = heads, width: int = width) -> list[int]:
            x, w, a = b.node("x", 4), b.weight("w", heads, 4, width), b.weight("a", heads, width)
            z = b.linear(b.src(x), w, "k,hkn->hn")
            return [z, b.linear(z, a, "hk,hk->h")]

        (gemm,) = fuse_gemm(Kernels(scores), COUNTS).instances
        assert isinstance(gemm, Gemm)
        assert (gemm.dot is not None) == made and (set(gemm.writes) == set(scores.outputs)) == made
        verify_kernels(fallback(fuse_traversal(fuse_gemm(Kernels(scores), COUNTS), COUNTS)))


def test_rows_without_edges_after_hoisting() -> None:
    """At a node without edges the quotient 0 / 0 is replaced before it is computed."""
    select = [op for op in hoist(mean, COUNTS).ops if op.name == "select"]
    assert len(select) == 1 and select[0].space == Space.NODE


def test_one_pass_for_softmax_and_weighted_sum() -> None:
    late = run_passes(attention, AFTER_BACKWARD, COUNTS, frozenset(), lambda *_: None)
    count, loop = lower_to_kernels(late, COUNTS).instances
    assert isinstance(count, Fallback) and isinstance(loop, Traversal)
    assert [a.kind for a in loop.accumulators] == ["max", "weighted", "weighted"]
    # Only the result reaches memory.
    assert loop.writes == late.outputs


def test_a_softmax_saves_nothing_of_edges() -> None:
    """A maximum and a sum for each node, never a scalar for each edge."""
    halves = differentiated(optimise(attention, COUNTS), (0, 1), COUNTS)
    kept = [halves.forward.ops[o] for o in halves.forward.outputs[1:]]
    assert {op.space for op in kept} == {Space.NODE}


@pytest.mark.parametrize("disabled", ["gemm", "traversal"])
def test_templates_can_be_switched_off(disabled: str) -> None:
    kinds = {type(i) for i in lower_to_kernels(message_passing, COUNTS, frozenset({disabled})).instances}
    assert kinds == {"gemm": {Traversal, Fallback}, "traversal": {Gemm, Fallback}}[disabled]


def test_gradients_of_all_inputs_and_of_some() -> None:
    for wrt in ((), (0,), (1,), (0, 1)):
        joint = dce(differentiate(message_passing, wrt), COUNTS)
        assert len(joint.outputs) == 1 + len(wrt)
        assert ("outer" in names(joint)) == (1 in wrt)


def test_lines_survive_the_passes() -> None:
    b = Tiny("lines")
    b.line = "model.py:7"
    x, w = b.node("x", 4), b.weight("w", 4, 3)
    b.line = "model.py:8"
    p = b.build([b.sum(b.op("mul", b.linear(b.src(x), w), b.edge("e")))])
    for disabled in ((), ("aggregate",)):
        after = run_passes(
            optimise(p, COUNTS, frozenset(disabled)), AFTER_BACKWARD, COUNTS, frozenset(), lambda *_: None
        )
        found = {line for op, line in zip(after.ops, after.lines, strict=True) if op.name == "linear"}
        assert found == {"model.py:8"}


def test_outer_products_are_weight_gradients() -> None:
    kernels = verify_kernels(fallback(fuse_gemm(Kernels(products), COUNTS)))
    assert [type(i) for i in kernels.instances] == [Gemm, WeightGradient]


CHOICES = ("reorder", "aggregate", "fold", "compact", "hoist", "contract", "recompute")
SETS = [chosen for n in range(len(CHOICES) + 1) for chosen in itertools.combinations(CHOICES, n)]
# Every pair of passes on and off together; all 128 sets in `make test-slow`.
FEW = [chosen for chosen in SETS if not 2 < len(chosen) < len(CHOICES) - 1]


@pytest.mark.parametrize(
    ("case", "counts", "sets"),
    [
        pytest.param("hgt_skip", COUNTS, FEW[:9], id="hgt_skip-dense"),
        pytest.param("rgat", SPARSE, FEW[:9], id="rgat-sparse"),
        *(
            pytest.param(case, counts, SETS, marks=pytest.mark.slow)
            for case in ("rgcn_mean", "rgat", "hgt_skip")
            for counts in (COUNTS, SPARSE)
        ),
    ],
)
def test_models_become_kernels_whichever_passes_choose(case: str, counts: Counts, sets: list[tuple[str, ...]]) -> None:
    """With every combination of the passes that choose, no instance waits for itself."""
    arrays = {
        key: a.astype("float32") for key, a in make_arrays(case, GRAPHS["typical"], Size(16, 8, 2), "float32").items()
    }
    layer, x = {"rgcn_mean": library.rgcn, "rgat": library.rgat, "hgt_skip": library.hgt}[case], arrays.pop("x")
    for chosen in sets:
        task, _, _ = layer._prepare(graph_of("typical"), Options(disable=chosen), (x, arrays), {})
        task = replace(task, counts=counts)
        parts = execute.training_cut(task, execute.differentiable_positions(task))
        for part in (parts.forward, parts.backward):
            execute.inference_kernels(execute.CompileTask(part, counts, task.options, raw=False))


@pytest.mark.parametrize(("same_weights", "stores"), [(True, False), (False, True)])
def test_rows_that_are_subtracted_after_products_with_the_same_weights_keep_float32(
    same_weights: bool, stores: bool
) -> None:
    """`sum(h V) - sum(tanh(x) W)`, with h = tanh(x) W, may cancel where V is W; nothing says so of other weights."""
    b = Tiny("difference")
    x, w = b.op("tanh", b.node("x", 32)), b.weight("w", 32, 32)
    v = w if same_weights else b.weight("v", 32, 32)
    stored = b.linear(b.src(x), w, "k,kn->n")
    through = b.sum(b.linear(stored, v, "k,kn->n"))
    program = b.build([b.op("sub", through, b.sum(b.linear(b.src(x), w, "k,kn->n")))])
    assert linear_in(program, stored) == stores


@pytest.mark.parametrize(("other", "stores"), [("row", False), (0.1, False), (0.0, True)])
def test_rows_that_are_compared_with_others_keep_float32(other: Any, stores: bool) -> None:
    """Rounded rows equal no maximum that was found among unrounded ones; their signs stay."""
    b = Tiny("compared")
    x = b.node("x", 32)
    y = b.node("m", 32) if other == "row" else b.const(other, "float32", Space.NODE)
    mask = b.op("eq" if other == "row" else "gt", x, y)
    program = b.build([b.sum(b.src(b.op("mul", b.node("y", 32), mask)))])
    assert linear_in(program, x) == stores
