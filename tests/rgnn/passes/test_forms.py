"""Other spellings of a program keep its results and gradients: infinite scales, broadcasting, integers, differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import RelGraph
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Space
from dejax.rgnn.passes.canonical.plain_forms import plain_forms
from dejax.rgnn.passes.canonical.split_sums import split_sums
from tests.rgnn.preserved import by_numpy

# Nodes 0 and 6 and edge types 2 and 3 have no edges.
N, E, R = 7, 12, 4
RNG = np.random.default_rng(0)
GRAPH = RelGraph.from_edges(
    RNG.integers(0, 5, E), RNG.integers(1, 6, E), RNG.integers(0, 2, E), num_edge_types=R, num_nodes=N
)
COUNTS = Counts(nodes=50, edges=100, source_pairs=60, destination_pairs=60, edge_types=2, node_types=2)


def normal(*shape):
    return RNG.normal(size=shape) * 0.5


def edges_of_types(g):
    return g.sum_to_edge_type(g.edge(np.ones(E)))


def divided_by_type(g, x, w):
    return g.sum_to_dst(rgnn.tanh((g.src(x) @ g.per_edge_type(w)) / edges_of_types(g)))


def scaled_by_type(g, x, w):
    return g.sum_to_dst(rgnn.tanh((g.src(x) @ g.per_edge_type(w)) * rgnn.rsqrt(edges_of_types(g))))


def scaled_by_type_before(g, x, w):
    return g.sum_to_dst(rgnn.tanh((g.src(x) * rgnn.rsqrt(edges_of_types(g))) @ g.per_edge_type(w)))


def scaled_inner_product(g, x, w):
    return rgnn.dot(g.src(x) @ g.per_edge_type(w), g.dst(x)) * rgnn.rsqrt(edges_of_types(g))


def basis(g, x, v):
    scales = rgnn.rsqrt(g.sum_to_edge_type(g.edge(np.ones((E, R)))))
    return g.sum_to_dst(rgnn.tanh(((g.src(x) @ g.shared(v)) * scales[:, None]).sum(0)))


def basis_in_a_loop(g, x, v):
    scale, v = rgnn.rsqrt(edges_of_types(g)), g.shared(v)
    return g.sum_to_dst(rgnn.tanh(sum(scale * (g.src(x) @ v[b]) for b in range(R))))


def scaled_by_degree(g, x):
    return g.sum_to_dst(rgnn.tanh(g.src(x) * g.src(rgnn.rsqrt(g.sum_to_src(1.0)))))


def centred_by_degree(g, x):
    row = g.src(x) / g.src(g.sum_to_src(1.0))
    return g.sum_to_dst(g.dst(x) * (row - row.mean(keepdims=True)))


def parts_with_one_bias(g, x, w, b):
    y = rgnn.tanh(g.src(x) @ g.shared(w) + g.shared(b))
    return g.sum_to_dst(y[2:3] * y[5] + y[0])


def infinite_bias(g, x, w, b):
    return rgnn.exp(g.sum_to_dst((g.src(x) * g.edge(np.ones(E))) @ g.shared(w) + g.shared(b)))


def integers(g, x, y, w):
    return g.sum_to_dst(rgnn.tanh(g.src(x) @ g.shared(w) + g.src(y) @ g.shared(w)))


def sums_of_integers(g, x, y, w):
    return g.sum_to_dst(rgnn.tanh((g.src(x) + g.dst(y)) @ g.shared(w)))


X, W = normal(N, 3), normal(R, 3, 3)
INTEGERS = [RNG.integers(-100, 100, (N, 3)).astype(np.int8) for _ in range(2)]
CASES = {
    divided_by_type: (X, W),
    scaled_by_type: (X, W),
    scaled_by_type_before: (X, W),
    scaled_inner_product: (X, W),
    basis: (X, W),
    basis_in_a_loop: (X, W),
    scaled_by_degree: (X,),
    centred_by_degree: (X,),
    parts_with_one_bias: (X, normal(3, 6), normal(1)),
    infinite_bias: (X, normal(3, 3), np.array([-np.inf, 0.0, 1.0])),
    integers: (*INTEGERS, normal(3, 3)),
    sums_of_integers: (*INTEGERS, normal(3, 3)),
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_results_and_gradients_are_those_without_passes(function):
    with jax.enable_x64(True), by_numpy(exact=(False,)) as programs:
        result = rgnn.program(function)(GRAPH, *map(jnp.asarray, CASES[function]))
    assert len(programs) == 1 and np.isfinite(result).all()


def test_rows_reshaped_and_back_are_the_first_value():
    builder = Builder("rows")
    x = builder.op("input", space=str(Space.NODE), shape=(2,), dtype="float32", name="x", position=0)
    there = builder.op("reshape", x, shape=(2, 1))
    program = builder.build([builder.op("tanh", builder.op("reshape", there, shape=(2,)))])
    made = plain_forms(program, COUNTS)
    (tanh,) = (op for op in made.ops if op.name == "tanh")
    assert made.ops[tanh.args[0]].name == "input"


@pytest.mark.parametrize("by", ["neg", "factor"])
def test_sums_with_a_term_that_is_written_as_negative_stay(by):
    builder = Builder("difference")
    x = builder.op("input", space=str(Space.NODE), shape=(4,), dtype="float32", name="x", position=0)
    w = builder.op("input", space=str(Space.GRAPH), shape=(4, 3), dtype="float32", name="w", position=1)
    less = builder.op("neg", x) if by == "neg" else builder.op("mul", builder.const(-1.0, "float32", Space.NODE), x)
    total = builder.op("add", builder.op("gather", x, via="src"), builder.op("gather", less, via="dst"))
    program = builder.build([builder.op("linear", total, w, spec="k,kn->n", via="all")])
    assert [op.name for op in split_sums(program, COUNTS).ops].count("linear") == 1
