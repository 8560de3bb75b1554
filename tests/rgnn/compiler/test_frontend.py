"""The front end: traced programs, and errors of misuse, which point at the user's line and name the remedy."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, ProgramError, RelGraph, library
from tests.rgnn.references import graph_of

GRAPH = graph_of("typical")
N, E, R, T = GRAPH.num_nodes, GRAPH.num_edges, GRAPH.num_edge_types, GRAPH.num_node_types
ARRAYS = {
    "x": jnp.ones((N, 3)),
    "heads": jnp.ones((N, 2, 3)),
    "number": jnp.ones((N,)),
    "e": jnp.ones((E, 3)),
    "w": jnp.ones((R, 3, 4)),
    "v": jnp.ones((T, 3, 4)),
    "u": jnp.ones((3, 4)),
    "c": jnp.ones((R, 3)),
    "d": jnp.ones((T, 3)),
    "n": jnp.zeros((N,), jnp.int32),
    "alpha": jnp.ones(()),
}

OTHER: list[Any] = []


@rgnn.program
def _leaks(g: Any, a: Any) -> Any:
    OTHER[:] = [g.src(a["x"]), g.per_edge_type(a["w"]), a["x"]]
    return OTHER[0]


# A line of a program, and regular expressions that the message must match.
MISUSE: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "an edge value where a node value is needed": (
        lambda g, a: g.node(g.src(a["x"])),
        ("g.node needs a node value, got an edge value", r"g\.sum_to_dst\(\.\.\.\)"),
    ),
    "an edge value read at the source": (
        lambda g, a: g.src(g.src(a["x"]) * 2.0),
        ("g.src needs a node value, got an edge value", r"bring it to the nodes with g\.sum_to_dst"),
    ),
    "a node value where an edge value is needed": (
        lambda g, a: g.sum_to_dst(g.node(a["x"])),
        ("g.sum_to_dst needs an edge value, got a node value", r"read it on the edges with g\.src\(\.\.\.\)"),
    ),
    "a node value in an edge softmax": (
        lambda g, a: rgnn.edge_softmax(g.node(a["number"])),
        ("rgnn.edge_softmax needs an edge value, got a node value", r"g\.src\(\.\.\.\) or g\.dst\(\.\.\.\)"),
    ),
    "a node value meets an edge value": (
        lambda g, a: g.node(a["x"]) + g.edge(a["e"]),
        ("operands must be in one space, got an edge value and a node value", r"g\.sum_to_dst"),
    ),
    "a node-type constant meets an edge-type constant": (
        lambda g, a: g.per_node_type(a["d"]) + g.per_edge_type(a["c"]),
        ("must be in one space, got an edge-type constant and a node-type constant", r"g\.src\(\.\.\.\)"),
    ),
    "an inner product over two spaces": (
        lambda g, a: rgnn.dot(g.src(a["x"]), g.node(a["x"])),
        ("must be in one space, got an edge value and a node value",),
    ),
    "a wrong width": (
        lambda g, a: g.src(a["e"]) @ g.per_edge_type(a["w"]),
        (r"g\.src needs one row for each node \(11\)", r"argument \"a\['e'\]\" has shape \(40, 3\)"),
    ),
    "rows too narrow for the weight": (
        lambda g, a: g.src(a["x"])[:2] @ g.per_edge_type(a["w"]),
        ("rows of an edge value must be 3 wide, as the weight is, got 2",),
    ),
    "a weight of too many axes": (
        lambda g, a: g.src(a["heads"]) @ g.per_edge_type(a["w"])[..., None, None],
        (r"weight of shape \(width,\), \(width, out\) or \(heads, width, out\)", r"got \(2, 3\) and \(3, 4, 1, 1\)"),
    ),
    "an untyped weight": (
        lambda g, a: g.src(a["x"]) @ a["w"],
        (r"the weight \"a\['w'\]\" of shape \(4, 3, 4\) must say whether it is typed", r"x @ g\.per_edge_type\(w\)"),
    ),
    "a list as a weight": (
        lambda g, a: g.src(a["x"]) @ [[1.0], [2.0], [3.0]],
        ("needs a weight made by g.per_edge_type, g.per_node_type or g.shared", "list"),
    ),
    "an array as a weight of another width": (
        lambda g, a: g.src(a["x"]) @ np.ones((2, 4)),
        ("rows of an edge value must be 2 wide, as the weight is, got 3",),
    ),
    "a weight on the left": (
        lambda g, a: np.ones((4, 3)) @ g.src(a["x"]),
        ("a weight stands on the right",),
    ),
    "an edge-type weight on the nodes": (
        lambda g, a: g.node(a["x"]) @ g.per_edge_type(a["w"]),
        ("a node value cannot be multiplied by an edge-type constant", r"g\.src\(h\) @ g\.per_edge_type\(w\)"),
    ),
    "a node-type weight on the edges": (
        lambda g, a: g.src(a["x"]) @ g.per_node_type(a["v"]),
        ("an edge value cannot be multiplied by a node-type constant", r"g\.node\(h\) @ g\.per_node_type\(w\)"),
    ),
    "ranks that differ": (
        lambda g, a: g.src(a["heads"]) * g.per_edge_type(a["c"]),
        (r"feature shapes \(2, 3\) and \(3,\) have different ranks", r"x\[\.\.\., None\]"),
    ),
    "widths that differ": (
        lambda g, a: g.src(a["x"]) + g.per_edge_type(a["w"])[0],
        (r"feature shapes \(3,\) and \(4,\) do not broadcast at axis 0",),
    ),
    "an inner product of other widths": (
        lambda g, a: rgnn.dot(g.src(a["x"]), g.src(a["x"])[:2]),
        (r"same feature shape with a width, got \(3,\) and \(2,\)",),
    ),
    "an argument used in two spaces": (
        lambda g, a: (g.per_edge_type(a["w"]), g.shared(a["w"])),
        ("used here as a shared value and elsewhere as an edge-type constant", "an argument has rows of one kind"),
    ),
    "a wrong number of rows": (
        lambda g, a: g.per_edge_type(a["v"]),
        (r"g\.per_edge_type needs one row for each edge type \(4\)", r"\"a\['v'\]\" has shape \(3, 3, 4\)"),
    ),
    "arithmetic with an argument": (
        lambda g, a: a["x"] * 2.0,
        (r"argument \"a\['x'\]\" of shape \(11, 3\) must say what its rows stand for", r"g\.src\(x\)"),
    ),
    "a value plus an argument": (
        lambda g, a: g.src(a["x"]) + a["e"],
        (r"argument \"a\['e'\]\" of shape \(40, 3\) must say what its rows stand for", r"g\.edge\(x\)"),
    ),
    "an argument in a function": (lambda g, a: rgnn.tanh(a["x"]), ("must say what its rows stand for",)),
    "arithmetic with a list": (
        lambda g, a: g.src(a["x"]) + [1.0, 2.0, 3.0],
        ("operands must be values, numbers or arrays, got list",),
    ),
    "an array of too few rows": (
        lambda g, a: g.src(jnp.ones((N - 1, 3))),
        (r"g\.src needs one row for each node \(11\)", r"array 1 closed over' has shape \(10, 3\)"),
    ),
    "a list where a value is needed": (
        lambda g, a: g.src([1.0]),
        ("g.src takes an array, an argument of the program or a value made from one, got list",),
    ),
    "a sum to the type of another kind": (
        lambda g, a: g.sum_to_edge_type(g.node(a["x"])),
        ("g.sum_to_edge_type needs an edge value, got a node value",),
    ),
    "a sum of what has no rows": (
        lambda g, a: g.sum_to_graph(g.shared(a["u"])),
        ("g.sum_to_graph needs a value of nodes, edges, pairs or types, got a shared value",),
    ),
    "a readout by numbers that are no integers": (
        lambda g, a: g.sum_by(g.node(a["x"]), a["number"], 3),
        ("must be one integer per row, got float32",),
    ),
    "a readout of nobody knows how many": (
        lambda g, a: g.sum_by(g.node(a["x"]), a["n"], a["n"]),
        ("must be a non-negative Python int, got",),
    ),
    "a lookup by numbers that are no integers": (
        lambda g, a: g.shared(a["u"])[g.node(a["number"])],
        ("an index must be of integers, got float32",),
    ),
    "a lookup in a number": (
        lambda g, a: g.node(a["number"])[g.node(a["n"])],
        ("a node value must have a feature axis to look up in",),
    ),
    "a lookup behind another index": (
        lambda g, a: g.shared(a["u"])[0, g.node(a["n"])],
        ("an index that is a value must be the first",),
    ),
    "a lookup by an argument": (
        lambda g, a: g.shared(a["u"])[a["n"]],
        (r"argument \"a\['n'\]\" of shape \(11,\) must say what its rows stand for",),
    ),
    "logic of numbers that are no masks": (
        lambda g, a: g.node(a["n"]) & g.node(a["n"]),
        ("must be masks", "write x != 0"),
    ),
    "a softmax of rows that have no type": (
        lambda g, a: rgnn.row_softmax(g.per_edge_type(a["c"]), within="type"),
        ("needs rows of nodes, edges or pairs, got an edge-type constant",),
    ),
    "the same axis twice": (
        lambda g, a: g.node(a["heads"]).sum((0, -2)),
        (r"axis must name each axis of feature shape \(2, 3\) at most once, got \(0, -2\)",),
    ),
    "a value as a number": (lambda g, a: float(g.node(a["number"])), ("a value is no number",)),
    "a value as an array": (lambda g, a: np.asarray(g.node(a["number"])), ("do not take values of a program",)),
    "an argument of one number": (
        lambda g, a: g.node(a["x"]) * a["alpha"],
        (r"argument \"a\['alpha'\]\" is a scalar array", r"write g\.shared\(x\)"),
    ),
    "an argument of one number where Python needs one": (
        lambda g, a: [g.node(a["x"]) for _ in range(a["alpha"])],
        (r"write g\.shared\(x\)", "static_argnums"),
    ),
    "an array in a function": (
        lambda g, a: rgnn.exp(np.ones(3)),
        ("rgnn.exp takes a value of the program, got ndarray",),
    ),
    "another program's value": (
        lambda g, a: OTHER[0] * 2.0 + g.src(a["x"]),
        ("must use its own arguments and values only",),
    ),
    "another program's value, read": (
        lambda g, a: g.sum_to_dst(OTHER[0]),
        ("must use its own arguments and values only",),
    ),
    "another program's argument": (lambda g, a: g.src(OTHER[2]), ("must use its own arguments and values only",)),
    "an axis out of range": (lambda g, a: g.src(a["x"]).sum(1), (r"axis 1 is out of range for feature shape \(3,\)",)),
    "an index out of range": (lambda g, a: g.src(a["x"])[3], ("index 3 is out of range for feature axis 0 of size 3",)),
    "too many indices": (
        lambda g, a: g.src(a["x"])[0, 0],
        (r"too many indices for feature shape \(3,\)", "only features are indexed, never rows"),
    ),
    "a step": (lambda g, a: g.src(a["x"])[::2], ("slices without a step",)),
    "a reshape of another size": (
        lambda g, a: g.src(a["x"]).reshape(2, 2),
        (r"reshape of feature shape \(3,\) to \(2, 2\)",),
    ),
    "a power that is text": (lambda g, a: g.src(a["x"]) ** "2", ("arithmetic with str is not possible here",)),
    "a softmax within nothing": (
        lambda g, a: rgnn.edge_softmax(g.src(a["x"]), within="node"),
        (r"within=\.\.\.\) must be 'dst', 'src' or 'relation', got 'node'",),
    ),
    "no values to concatenate": (lambda g, a: rgnn.concatenate([]), ("at least one value",)),
    "a stack of other shapes": (
        lambda g, a: rgnn.stack([g.src(a["heads"]), g.dst(a["x"])]),
        (r"values of one feature shape, got \(2, 3\) and \(3,\)",),
    ),
    "a stack along an axis that is not there": (
        lambda g, a: rgnn.stack([g.src(a["x"]), g.dst(a["x"])], axis=2),
        (r"axis must be from -2 to 1 for values of feature shape \(3,\), got 2",),
    ),
    "a transpose with too few axes": (
        lambda g, a: g.src(a["heads"]).transpose(0),
        (r"axes must name each of the 2 feature axes once, got \(0,\)", "rows are no axis"),
    ),
    "numbers to concatenate": (
        lambda g, a: rgnn.concatenate([g.src(a["number"]), g.dst(a["number"])]),
        (r"x\[None\] gives a scalar an axis of size 1",),
    ),
    "concatenation of other shapes": (
        lambda g, a: rgnn.concatenate([g.src(a["heads"]), g.dst(a["x"])]),
        (r"concat of different ranks: \(2, 3\), \(3,\)",),
    ),
}


def test_misuse_covers_other_traces() -> None:
    _leaks(GRAPH, ARRAYS)
    assert len(OTHER) == 3


@pytest.mark.parametrize("what", MISUSE)
def test_misuse(what: str) -> None:
    _leaks(GRAPH, ARRAYS)
    function, parts = MISUSE[what]
    program = rgnn.program(lambda g, a: function(g, a))
    with pytest.raises(ProgramError) as raised:
        program(GRAPH, ARRAYS)
    message = str(raised.value)
    where, rest = re.fullmatch(rf"{re.escape(__file__)}:(\d+): (.*)", message, re.DOTALL).groups()  # type: ignore[union-attr]
    source, first = inspect.getsourcelines(function)
    assert first <= int(where) < first + len(source), message
    for part in parts:
        assert re.search(part, rest), f"{part!r} is not in {rest!r}"
    # The line itself is quoted.
    assert rest.splitlines()[-1].strip() in "".join(source)


def test_an_error_names_the_line_of_a_helper_not_of_its_caller() -> None:
    def helper(g: Any, x: Any) -> Any:
        return g.sum_to_dst(x)  # the line at fault

    @rgnn.program
    def layer(g: Any, x: Any) -> Any:
        return helper(g, g.node(x))

    with pytest.raises(ProgramError, match="# the line at fault"):
        layer(GRAPH, ARRAYS["x"])


@pytest.mark.parametrize("result", [lambda g, a: a["x"], lambda g, a: (g.src(a["x"]), 3.0), lambda g, a: None])
def test_a_program_must_return_values(result: Callable) -> None:
    program = rgnn.program(result)
    with pytest.raises(ProgramError, match=r"must return values made from its arguments") as raised:
        program(GRAPH, ARRAYS)
    assert str(raised.value).startswith(f"{__file__}:{result.__code__.co_firstlineno}: ")


def test_errors_of_calls() -> None:
    @rgnn.program
    def layer(g: Any, x: Any, how: str = "sum") -> Any:
        return g.sum_to_dst(g.src(x))

    with pytest.raises(TypeError, match="must be a RelGraph, got ndarray"):
        layer(np.ones((N, 3)), np.ones((N, 3)))
    with pytest.raises(TypeError, match=r"layer.*missing a required argument: 'x'"):
        layer(GRAPH)
    with pytest.raises(TypeError, match="must be arrays or hashable"):
        layer(GRAPH, ARRAYS["x"], how=bytearray(b"sum"))
    for options, message in (
        ({"backend": "cuda"}, "backend must be one of auto, pallas, xla, got 'cuda'"),
        ({"precision": "f16"}, "precision must be None or one of f32, tf32, bf16, got 'f16'"),
        ({"disable": ("cse", "speed")}, "`disable` must be names of passes, got speed; the passes are unit_axes, cse"),
    ):
        with pytest.raises(ValueError, match=message):
            Options(**options)
        with pytest.raises(ValueError, match=message):
            rgnn.program(lambda g, x: g.src(x), **options)


def test_errors_of_the_library() -> None:
    x = ARRAYS["x"]
    with pytest.raises(ProgramError, match="rgcn: the parameters lack weight; needed are weight, optional root, bias"):
        library.rgcn(GRAPH, x, {})
    with pytest.raises(ProgramError, match="rgcn: the parameters hold unknown wieght"):
        library.rgcn(GRAPH, x, {"weight": ARRAYS["w"], "wieght": ARRAYS["w"]})
    with pytest.raises(ProgramError, match="normalization must be 'mean', 'sum' or 'none', got 'max'"):
        library.rgcn(GRAPH, x, {"weight": ARRAYS["w"]}, normalization="max")
    with pytest.raises(ProgramError, match="x must be given with block-diagonal weights"):
        library.rgcn(GRAPH, None, {"blocks": jnp.ones((R, 1, 3, 3))})
    with pytest.raises(ProgramError, match="rgat: the parameters lack attention_src, attention_dst"):
        library.rgat(GRAPH, x, {"weight": ARRAYS["w"]})
    wide = {name: jnp.ones((T, 1, 3, 3)) for name in ("key", "query", "value")}
    relation = {name: jnp.ones((R, 1, 3, 3)) for name in ("relation_attention", "relation_message")}
    params = wide | relation | {"prior": jnp.ones((R, 1)), "out": jnp.ones((T, 3, 5)), "skip": jnp.ones((T,))}
    with pytest.raises(ProgramError, match="hgt: skip needs input and output of the same width, got 3 and 5"):
        library.hgt(GRAPH, x, params)


def test_pytrees_statics_and_keywords() -> None:
    @rgnn.program
    def layer(g: Any, x: Any, params: dict, *, power: int, names: tuple[str, ...] = ("w",)) -> Any:
        y = g.src(x["features"]) @ g.per_edge_type(params[names[0]])
        return {"edges": y**power, "nodes": [g.sum_to_dst(y)]}

    got = layer(GRAPH, {"features": ARRAYS["x"]}, {"w": ARRAYS["w"], "unused": None}, power=2)
    assert sorted(got) == ["edges", "nodes"]
    np.testing.assert_allclose(got["edges"], np.full((E, 4), 9.0))
    degree = np.bincount(np.asarray(GRAPH.to_edges()[1]), minlength=N)
    np.testing.assert_allclose(got["nodes"][0], np.repeat(degree[:, None] * 3.0, 4, axis=1))


def test_arguments_that_the_program_never_uses_get_zero_gradients() -> None:
    @rgnn.program
    def layer(g: Any, x: Any, unused: Any) -> Any:
        return g.sum_to_dst(g.src(x))

    grads = jax.grad(lambda x, u: layer(GRAPH, x, u).sum(), (0, 1))(ARRAYS["x"], ARRAYS["w"])
    assert float(jnp.abs(grads[0]).sum()) > 0
    np.testing.assert_array_equal(grads[1], np.zeros_like(ARRAYS["w"]))


def test_numpy_arrays_and_integers() -> None:
    @rgnn.program
    def layer(g: Any, x: Any, number: Any) -> Any:
        return g.sum_to_dst(g.src(x)), g.max_to_dst(g.src(x)), g.node(x) * number

    x = np.arange(N, dtype=np.int32)
    total, largest, twice = layer(GRAPH, x, 2)
    senders, receivers, _ = (np.asarray(a) for a in GRAPH.to_edges())
    want, most = np.zeros(N, np.int64), np.zeros(N, np.int64)
    np.add.at(want, receivers, x[senders])
    np.maximum.at(most, receivers, x[senders])
    assert total.dtype == jnp.int32
    np.testing.assert_array_equal(total, want)
    np.testing.assert_array_equal(largest, most)
    np.testing.assert_array_equal(twice, 2 * x)


def test_edge_results_are_in_the_order_of_the_user_s_edges() -> None:
    @rgnn.program
    def ends(g: Any, x: Any, e: Any) -> Any:
        return g.src(x), g.dst(x), g.edge(e) * 1.0

    senders, receivers, kinds = np.array([3, 0, 2, 0]), np.array([1, 1, 0, 3]), np.array([2, 0, 1, 0])
    graph = RelGraph.from_edges(senders, receivers, kinds, num_nodes=4)
    x, e = jnp.arange(4.0), jnp.arange(4.0) + 10
    source, destination, edge = ends(graph, x, e)
    np.testing.assert_array_equal(source, senders)
    np.testing.assert_array_equal(destination, receivers)
    np.testing.assert_array_equal(edge, e)


def test_a_program_keeps_its_name_and_documentation() -> None:
    assert library.rgat.__name__ == "rgat" and "ARGAT" in library.rgat.__doc__
    assert repr(library.rgat) == "<rgnn.program rgat>"
    assert library.rgat.with_options(backend="xla").options == Options(backend="xla")


def test_integers_become_floats_where_results_are_not_whole() -> None:
    """As in jax.numpy: half of an integer is not 0."""

    @rgnn.program
    def layer(g: Any, n: Any) -> Any:
        x = g.node(n)
        halves = (
            x * 0.5,
            x / 2,
            1.0 / (x + 1),
            x**0.5,
            x**-1.0,
            rgnn.leaky_relu(-x),
            rgnn.exp(-x),
            x / x.astype("int32"),
        )
        whole = (x * 2, x + 1, x**2, -x, rgnn.abs(-x), rgnn.maximum(x, 3))
        return halves, whole, g.mean_to_dst(g.src(x)), rgnn.edge_softmax(g.src(x))

    n = np.arange(1, N + 1, dtype=np.int32)
    halves, whole, mean, softmax = layer(GRAPH, n)
    want = (n * 0.5, n / 2, 1 / (n + 1), n**0.5, 1 / n, -0.2 * n, np.exp(-n.astype(float)), np.ones(N))
    for got, expected in zip(halves, want, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    for got, expected in zip(whole, (n * 2, n + 1, n**2, -n, n, np.maximum(n, 3)), strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, expected)
    assert mean.dtype == softmax.dtype == jnp.float32
    assert (np.asarray(mean) % 1 != 0).any()
    receivers = np.asarray(GRAPH.to_edges()[1])
    np.testing.assert_allclose(np.bincount(receivers, softmax, N)[np.unique(receivers)], 1, rtol=1e-6)


def test_booleans_as_masks() -> None:
    @rgnn.program
    def layer(g: Any, x: Any, mask: Any, n: Any) -> Any:
        return g.edge(mask) * g.src(x), rgnn.where_positive(g.edge(mask), g.src(x), 0.0), g.edge(mask) * g.src(n)

    x, mask, n = np.arange(N, dtype=np.float32) + 1, np.arange(E) % 3 == 0, np.arange(N, dtype=np.int32)
    senders = np.asarray(GRAPH.to_edges()[0])
    product, chosen, whole = layer(GRAPH, x, mask, n)
    np.testing.assert_array_equal(product, mask * x[senders])
    np.testing.assert_array_equal(chosen, mask * x[senders])
    assert whole.dtype == jnp.int32
    np.testing.assert_array_equal(whole, mask * n[senders])


def test_a_power_of_zero() -> None:
    """x ** 0 is 1 everywhere, without gradient, also at 0."""

    @rgnn.program
    def layer(g: Any, x: Any) -> Any:
        return g.node(x) ** 0, g.node(x) ** 1

    x = jnp.zeros((N,))
    for power, slope in ((0, 0.0), (1, 1.0)):
        got = jax.grad(lambda x, power=power: layer(GRAPH, x)[power].sum())(x)
        np.testing.assert_array_equal(got, np.full((N,), slope))


def test_a_sum_of_a_number_is_a_count() -> None:
    graph = rgnn.RelGraph.from_edges([0, 1, 1], [2, 2, 0], num_nodes=3)

    @rgnn.program
    def degrees(g: Any) -> Any:
        return g.sum_to_dst(1.0), g.sum_to_src(2.5)

    into, out = degrees(graph)
    assert into.tolist() == [1.0, 0.0, 2.0] and out.tolist() == [2.5, 5.0, 0.0]
    text = io.StringIO()
    degrees.explain(graph, options=rgnn.Options(backend="pallas"), summary=True, file=text)
    assert "traversal over dst" not in text.getvalue()
