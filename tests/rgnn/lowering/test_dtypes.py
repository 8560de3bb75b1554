"""Programs on integers, booleans and 16-bit floats against NumPy, and values that a program refuses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import library
from tests.cases import slow_but

SIXTEEN_BITS = ("float16", "bfloat16")
TRIANGLE = rgnn.RelGraph.from_edges([0, 1, 2], [1, 2, 0], [0, 0, 0], num_nodes=3)
BACKENDS = {"xla": rgnn.Options(backend="xla"), "pallas": rgnn.Options(backend="pallas", interpret=True)}


@pytest.fixture
def options(request):
    return BACKENDS[request.param]


ON_BOTH = pytest.mark.parametrize("options", BACKENDS, indirect=True)


def on_backends(quick, **values):
    """Some combinations of values, with the backend first, and the others as slow ones."""
    cases = slow_but(quick, itertools.product(BACKENDS, *values.values()))
    return pytest.mark.parametrize(("options", *values), cases, indirect=["options"])


def few_destinations(edges=120, nodes=30):
    """A graph on which rows are summed before they are multiplied."""
    rng = np.random.default_rng(0)
    ends = rng.integers(0, nodes, edges), rng.integers(0, 6, edges), rng.integers(0, 2, edges)
    return rgnn.RelGraph.from_edges(*ends, num_nodes=nodes), rng


@on_backends([("xla", "int32")], dtype=("int32", "int8", "bool"))
def test_integer_and_boolean_features(dtype, options):
    """Means of integers are fractions, also where the mean is computed before the product."""
    graph, rng = few_destinations()
    x = jnp.asarray(rng.integers(0, 2, (30, 4)), dtype)
    w = jnp.asarray(rng.standard_normal((2, 4, 8)), jnp.float32)
    edges = jnp.asarray(rng.standard_normal(120), jnp.float32)

    def layer(g, x, w, e):
        rows = g.src(x) @ g.per_edge_type(w)
        return g.sum_to_dst(rows / g.in_degree(within_relation=True)), g.sum_to_dst(rows * g.edge(e))

    program = rgnn.program(layer)
    run = lambda x, w: program(graph, x, w, edges, options=options)  # noqa: E731
    for found, expected in zip(run(x, w), run(x.astype(jnp.float32), w), strict=True):
        assert found.dtype == jnp.float32 and np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    gradient = jax.grad(lambda w, x: sum((r**2).sum() for r in run(x, w)))
    np.testing.assert_allclose(gradient(w, x), gradient(w, x.astype(jnp.float32)), rtol=5e-3, atol=5e-2)


def test_rgcn_of_counts():
    graph, rng = few_destinations()
    x = jnp.asarray(rng.integers(0, 3, (30, 4)))
    w = jnp.asarray(rng.standard_normal((2, 4, 8)), jnp.float32)
    run = lambda x: library.rgcn(graph, x, {"weight": w})  # noqa: E731
    np.testing.assert_allclose(run(x), run(x.astype(jnp.float32)), atol=1e-5)


SUMMED = {"int8": 1, "bool": True, "float16": 1000, "bfloat16": 1000}


@on_backends([("xla", "int8"), ("pallas", "float16")], dtype=SUMMED)
def test_a_sum_has_the_dtype_of_the_product(dtype, options):
    """300 messages times a float32 scalar of their destination, by which the compiler multiplies after the sum."""
    graph = rgnn.RelGraph.from_edges(np.arange(300) % 3, np.zeros(300, int), np.zeros(300, int), num_nodes=3)
    value = SUMMED[dtype]
    program = rgnn.program(lambda g, m, z: g.sum_to_dst(g.edge(m) * g.dst(z)))
    found = program(graph, jnp.full(300, value, dtype), jnp.ones(3), options=options)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [300 * float(jnp.asarray(value, dtype)), 0, 0])


@on_backends([("xla", 1000, "bfloat16")], degree=(1000, 70_000), dtype=SIXTEEN_BITS)
def test_means_of_many_rows_in_16_bits(degree, dtype, options):
    value = 100 if degree == 1000 else 1
    none = np.zeros(degree, int)
    graph = rgnn.RelGraph.from_edges(none, none, none, num_nodes=2)
    x = jnp.full((2, 1), value, dtype)
    for mean in (lambda g, x: g.mean_to_dst(g.src(x)), lambda g, x: g.sum_to_dst(g.src(x) / g.in_degree())):
        found = rgnn.program(mean)(graph, x, options=options)
        np.testing.assert_allclose(
            np.asarray(found, np.float32), [[value], [0]], rtol=2**-23
        )  # the last bit of float32


# Program, feature shape and magnitude of a node argument, other arguments, and the result at node 1.
MANY_EDGES = {
    "relations": (library.rgcn, (2,), 1, {"weight": np.full((2, 2, 3), 0.5)}, 2),
    "by_node": (lambda g, x, c: g.sum_to_dst(g.src(x) * g.dst(c)), (2,), 1, np.full(8, 1e-3), 70),
    "products": (lambda g, x, w: g.sum_to_dst(g.src(x) @ g.per_edge_type(w)), (2,), 1, np.full((2, 2, 3), 5e-4), 70),
    "features": (lambda g, x: g.node(x).mean(), (200,), 1000, None, 1000),
}


def long_segment(degree=70_010):
    """All 70,000 edges of one relation arrive at node 1: float16 ends at 65,504, bfloat16 counts exactly up to 256."""
    relation = (np.arange(degree) < 10).astype(int)
    return rgnn.RelGraph.from_edges(np.arange(degree) % 7, np.ones(degree, int), relation, num_nodes=8)


@on_backends(
    [
        ("xla", "relations", "float16"),
        ("xla", "features", "float16"),
        ("pallas", "by_node", "bfloat16"),
        ("pallas", "products", "float16"),
    ],
    name=MANY_EDGES,
    dtype=SIXTEEN_BITS,
)
def test_layers_in_16_bits_at_a_node_of_many_edges(name, dtype, options):
    program, shape, value, other, expected = MANY_EDGES[name]
    program = program if isinstance(program, rgnn.Program) else rgnn.program(program)
    others = [] if other is None else [jax.tree.map(lambda a: jnp.asarray(a, dtype), other)]
    found = program(long_segment(), jnp.full((8, *shape), value, dtype), *others, options=options)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float32)[1], expected, rtol=2e-2)


@on_backends([("xla", "float16")], dtype=SIXTEEN_BITS)
def test_many_equal_maxima_share_a_gradient_in_16_bits(dtype, options):
    largest, graph = rgnn.program(lambda g, e: g.max_to_dst(g.edge(e))), long_segment()
    equal = jnp.ones(graph.num_edges, dtype)
    gradient = jax.grad(lambda e: (3e4 * largest(graph, e, options=options)).sum())(equal)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), 3e4 / graph.num_edges, rtol=2e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int16", "uint8"])
def test_counts_are_in_dtypes_that_hold_them(dtype):
    for degree in (lambda g: g.in_degree(dtype=dtype), lambda g: g.out_degree(dtype=dtype)):
        with pytest.raises(rgnn.ProgramError, match=r"dtype of a count must be one of float32, .* cast the quotient"):
            rgnn.program(degree)(TRIANGLE)


def test_booleans():
    graph = rgnn.RelGraph.from_edges([0, 1], [1, 1], [0, 0], num_nodes=2)
    mask, x = jnp.array([True, True]), jnp.array([2.0, 3.0])
    run = lambda f, *args: np.asarray(rgnn.program(f)(graph, *args)).tolist()  # noqa: E731
    assert run(lambda g, m: g.sum_to_dst(g.src(m)), mask) == [0, 2]
    assert run(lambda g, m: g.max_to_dst(g.src(m)), mask) == [False, True]
    assert run(lambda g, m: g.mean_to_dst(g.src(m)), mask) == [0, 1]
    assert run(lambda g, m: g.node(m) * 3, mask) == [3, 3]
    assert run(lambda g, m: g.node(m) * 0.5, mask) == [0.5, 0.5]
    assert run(lambda g, m, x: (g.node(m) + 1) * g.node(x), mask, x) == [4, 6]
    assert run(lambda g, m: 1 - g.node(m), mask) == [0, 0]
    assert run(lambda g, m: g.node(m).sum(), jnp.ones((2, 3), bool)) == [3, 3]
    assert run(lambda g, m: g.node(m).mean(), jnp.ones((2, 4), bool)) == [1, 1]
    assert run(lambda g, m: rgnn.sign(g.node(m)) + rgnn.abs(g.node(m)), ~mask) == [False, False]
    for wrong in (lambda g, m: -g.node(m), lambda g, m: g.node(m) - g.src(m)):
        with pytest.raises(rgnn.ProgramError, match="is not defined for booleans|must be in one space"):
            rgnn.program(wrong)(graph, mask)


@ON_BOTH
def test_comparisons(options):
    label, x = jnp.array([1, 2, 1]), jnp.array([0.5, jnp.nan, 2.0])
    run = lambda f, *args: np.asarray(rgnn.program(f)(TRIANGLE, *args, options=options)).tolist()  # noqa: E731
    same = lambda g, x, n: g.sum_to_dst((g.src(n) == g.dst(n)) * g.src(x))  # noqa: E731
    assert run(same, jnp.array([3.0, 4.0, 5.0]), label) == [5, 0, 0]
    assert run(lambda g, n: g.node(n) != 1, label) == [0, 1, 0]
    assert run(lambda g, x: g.node(x) > 0.5, x) == [0, 0, 1]
    assert run(lambda g, x: g.node(x) >= 0.5, x) == [1, 0, 1]
    assert run(lambda g, x: g.node(x) < 2, x) == [1, 0, 0]
    assert run(lambda g, x: 2 <= g.node(x), x) == [0, 0, 1]
    assert run(lambda g, n: g.node(n) == 1.5, label) == [0, 0, 0]
    slope = jax.grad(
        lambda x: rgnn.program(lambda g, x: g.node(x) * (g.node(x) > 0))(TRIANGLE, x, options=options).sum()
    )
    np.testing.assert_array_equal(slope(jnp.array([-1.0, 0.0, 2.0])), [0, 0, 1])


@pytest.mark.parametrize(
    "body, message",
    [
        (lambda g, x: g.node(x) if g.node(x) > 0 else 0, "is not true or false"),
        (lambda g, x: x == 1, "without saying what its rows stand for"),
        (lambda g, x: list(g.node(x)), "no feature axis to unpack"),
        (lambda g, x: g.node(x)[None].sum(axis="all"), "axis must be a whole number, a tuple of them or None"),
    ],
)
def test_unsupported_operations_are_refused(body, message):
    with pytest.raises(rgnn.ProgramError, match=message):
        rgnn.program(body)(TRIANGLE, jnp.ones(3))


def test_features_are_unpacked():
    def swapped(g, x):
        first, second = g.node(x)
        return second - first

    np.testing.assert_array_equal(rgnn.program(swapped)(TRIANGLE, jnp.array([[1.0, 3.0]] * 3)), [2, 2, 2])


def test_complex_numbers_are_refused():
    rotate = rgnn.program(lambda g, x, r: g.sum_to_dst(g.src(x) * g.per_edge_type(r)))
    with pytest.raises(rgnn.ProgramError, match="argument 'x' must be real, got complex64"):
        rotate(TRIANGLE, jnp.ones((3, 2)) + 1j, jnp.ones((1, 2)))


def test_equal_static_numbers_of_different_types_are_distinct():
    first = rgnn.program(lambda g, x, top: g.node(x) if top is False else g.node(x)[:top])
    x = jnp.ones((3, 4))
    assert first(TRIANGLE, x, False).shape == (3, 4) and first(TRIANGLE, x, 0).shape == (3, 0)
    times = rgnn.program(lambda g, x, k: g.node(x) * k)
    dtypes = [times(TRIANGLE, jnp.arange(3), k).dtype for k in (2, 2.0, 2)]
    assert dtypes == [jnp.int32, jnp.float32, jnp.int32]
    zeros = [times(TRIANGLE, jnp.ones(3), k) for k in (0.0, -0.0)]
    np.testing.assert_array_equal(np.signbit(zeros), [[False] * 3, [True] * 3])


def test_64_bit_numpy_arrays_are_converted_as_in_jax():
    """Without a warning, and on kernels, too."""
    program = rgnn.program(lambda g, x: g.sum_to_dst(g.src(x) * 2))
    x = np.ones((3, 4))
    found = program(TRIANGLE, x, options=BACKENDS["pallas"])
    assert found.dtype == jnp.float32
    run = functools.partial(program, options=BACKENDS["pallas"])
    assert "pallas_call" in str(jax.make_jaxpr(lambda: run(TRIANGLE, x))())


@pytest.mark.parametrize(("dtype", "x64"), [("uint32", False), ("uint64", True)])
def test_minima_of_unsigned_integers_over_the_graph(dtype, x64):
    """They begin with the largest number, which no signed integer of JAX holds."""
    with jax.enable_x64(x64):
        x = jnp.array([7, 3, 9], dtype)
        found = rgnn.program(lambda g, x: (g.min_to_graph(g.node(x)), g.max_to_graph(g.node(x))))(TRIANGLE, x)
    assert [int(y) for y in found] == [3, 9] and found[0].dtype == dtype


def test_integer_powers_of_integers():
    found = rgnn.program(lambda g, m: g.node(m) ** 5)(TRIANGLE, jnp.array([31, 37, -3]))
    assert found.tolist() == [31**5, 37**5, -(3**5)]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_products_of_integers_wrap_around_before_a_float_multiplies_them(dtype):
    """As in jax.numpy. A factor of the destination moved behind the sum, where it multiplied floats."""
    graph, rng = few_destinations()
    info = np.iinfo(dtype)
    x, y = (rng.integers(info.min, info.max, (30, 3), dtype, endpoint=True) for _ in range(2))
    layer = rgnn.program(lambda g, x, y: g.sum_to_dst((g.src(x) * g.dst(y)) * 0.5))
    senders, receivers = (np.asarray(ends) for ends in (graph.senders, graph.receivers))
    want = np.zeros((30, 3))
    np.add.at(want, receivers, (x[senders] * y[receivers]) * 0.5)
    np.testing.assert_allclose(layer(graph, x, y), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_integers_that_floats_multiply_in_turn_do_not_multiply_each_other():
    """100 * (100 * x) of int8; a factor of the destination moved behind the sum, before which 100 * 100 was 16."""
    graph, _ = few_destinations()
    layer = rgnn.program(lambda g, e, x, y: g.sum_to_dst(g.edge(e) * (g.edge(e) * (g.src(x) * g.dst(y)))))
    found = layer(graph, jnp.full(120, 100, "int8"), jnp.ones(30), jnp.full(30, 2.0))
    np.testing.assert_allclose(found, 2e4 * np.bincount(np.asarray(graph.receivers), minlength=30))


@pytest.mark.parametrize(("dtype", "weight"), [("int8", 100), ("bool", True)])
def test_weights_of_integers_are_added_as_floats(dtype, weight):
    """Products of the same rows are combined by their weights, and 100 + 100 of int8 was -56."""
    graph, _ = few_destinations()
    given = jnp.ones((30, 4)), jnp.full((2, 4, 3), weight, dtype), jnp.full((4, 3), weight, dtype)
    layer = rgnn.program(lambda g, x, w, u: g.sum_to_dst(g.src(x) @ g.per_edge_type(w) + g.src(x) @ g.shared(u)))
    want = np.bincount(np.asarray(graph.receivers), minlength=30)[:, None] * np.full(3, 8.0 * int(weight))
    np.testing.assert_allclose(layer(graph, *given), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "number", "words"),
    [("uint8", -1, "from 0 to 255, got -1"), ("int8", 200, "from -128 to 127, got 200")]
    + [(dtype, 2**31, "from -2147483648 to 2147483647") for dtype in ("int32", "bool")],
)
def test_numbers_beyond_an_integer_dtype_are_refused(dtype, number, words):
    """As in jax.numpy. They wrapped around: no uint8 was above -1, and every int8 was at least 200."""
    x = jnp.zeros(3, dtype)
    uses = [lambda v: v > number, lambda v: number + v, lambda v: rgnn.where(v == 0, v, number), lambda v: v == number]
    for use in (*uses, lambda v: rgnn.clip(v, number)):
        with pytest.raises(
            rgnn.ProgramError, match=f"a number beside {dtype.replace('bool', 'int32')} values .* {words}"
        ):
            rgnn.program(lambda g, x, use=use: use(g.node(x)))(TRIANGLE, x)


def test_numbers_of_64_bits_keep_their_digits():
    """As float64 2^53 + 1 was 2^53."""
    large = np.array([2**53 + 1, 2**63 - 1, -(2**63)])

    def layer(g, x):
        return [*(g.node(x) == n for n in large.tolist()), 0 * g.node(x) + (2**53 + 1), g.node(x) <= 2**63 - 1]

    with jax.enable_x64(True):
        found = rgnn.program(layer)(TRIANGLE, jnp.asarray(large))
    np.testing.assert_array_equal(found, [*np.eye(3, dtype=int), [2**53 + 1] * 3, [1] * 3])


@pytest.mark.parametrize(("dtype", "x64"), [("uint32", False), ("uint64", True), ("int64", True), ("int8", False)])
def test_indices_past_the_end_of_any_integer_dtype(dtype, x64):
    """They are clipped, or left out of a readout; 2^31 and more became negative, and read the first row."""
    info = np.iinfo(dtype)
    last = info.max // 2 + 1 if info.min == 0 else info.max
    with jax.enable_x64(x64):
        ids, table = jnp.asarray(np.array([last, info.max, 1], dtype)), jnp.arange(1.0, 4.0)
        layer = rgnn.program(lambda g, ids, w, x: (g.shared(w)[g.node(ids)], g.sum_by(g.node(x), g.node(ids), 3)))
        rows, sums = layer(TRIANGLE, ids, table, table)
    np.testing.assert_array_equal(rows, [3, 3, 2])
    np.testing.assert_array_equal(sums, [0, 3, 0])


@ON_BOTH
def test_elu_near_zero(options):
    x = jnp.array([-1e-6, -1e-8, -50.0])
    found = rgnn.program(lambda g, x: rgnn.elu(g.node(x)))(TRIANGLE, x, options=options)
    np.testing.assert_allclose(found, np.expm1(np.asarray(x, np.float64)), rtol=1e-5)


@ON_BOTH
def test_a_maximum_where_all_are_minus_infinity(options):
    graph = rgnn.RelGraph.from_edges([0, 1, 0], [1, 1, 0], [0, 0, 0], num_nodes=3)
    program = rgnn.program(lambda g, s: g.max_to_dst(g.edge(s)))
    found = program(graph, jnp.array([-jnp.inf, -jnp.inf, -2.0]), options=options)
    np.testing.assert_array_equal(found, [-2, 0, 0])


@on_backends([("xla", True), ("pallas", False)], gradient=(False, True))
def test_empty_weights(options, gradient):
    def layer(g, x, w):
        return g.sum_to_dst(g.src(x) @ g.per_edge_type(w))

    graph = rgnn.RelGraph.from_edges([0, 1, 1], [1, 0, 1], [0, 1, 0], num_nodes=2)
    empty = rgnn.RelGraph.from_relations({}, {"a": 2})
    for g, x, w in (
        (graph, (2, 2), (2, 2, 0)),
        (graph, (2, 0), (2, 0, 3)),
        (empty, (2, 20), (0, 20, 30)),
    ):
        run = lambda x, w, g=g: rgnn.program(layer)(g, x, w, options=options)  # noqa: E731
        args = jnp.ones(x), jnp.ones(w)
        if gradient:
            found = jax.grad(lambda *a, run=run: run(*a).sum(), argnums=(0, 1))(*args)
            assert [f.shape for f in found] == [x, w]
        else:
            np.testing.assert_array_equal(run(*args), np.zeros((2, w[2])))


def test_names_of_added_edge_types():
    with pytest.raises(ValueError, match="edge_type_names must not have .* got rev_a"):
        rgnn.RelGraph.from_edges(
            [0], [1], [0], num_nodes=2, num_edge_types=2, edge_type_names=["a", "rev_a"], add_reverse=True
        )


def test_errors_of_graph_and_options():
    program = rgnn.program(lambda g, x: g.node(x))
    with pytest.raises(TypeError, match="outside of other programs"):
        rgnn.program(lambda g, x: program.explain(g, x))(TRIANGLE, jnp.ones(3))
    with pytest.raises(TypeError, match="inside another program, whose options apply"):
        rgnn.program(lambda g, x: program(g, x, options=rgnn.Options()))(TRIANGLE, jnp.ones(3))
    with pytest.raises(TypeError, match=r"options must be rgnn.Options, got dict"):
        program(TRIANGLE, jnp.ones(3), options={"backend": "xla"})
