"""The error bound of each precision, column by column, on arrays of all scales (docs/precision.md)."""

import itertools
import sys
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.pallas.products import grouped_gemm
from dejax.rgnn import Options
from dejax.rgnn.lowering import running
from tests.cases import slow_but
from tests.rgnn.lowering import scaled
from tests.rgnn.lowering.scaled import CASES, Yardsticks, arrays, column_errors, runner

# Relative to float64, each column of results and gradients, products that do not cancel. docs/precision.md has these.
PROMISED = {"f32": 1e-6, "tf32": 2e-3, "bf16": 2e-2}
# Errors of float32 itself; ratios of smaller errors have no meaning.
FLOOR = {"f32": 2e-7, "tf32": 1e-6}
SCALES = (1e-12, 1e-6, 1e6, 1e12)


@cache
def yardsticks(name: str) -> Yardsticks:
    return Yardsticks(CASES[name], scaled.graph())


@cache
def kernels(name: str, precision: str):
    return runner(CASES[name], Options(backend="pallas", precision=precision, interpret=True))


def errors(
    name: str, precision: str, where: str, factor: float, seed: int = 0, *, by_feature: bool = False
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """For the result and each gradient, its errors by column and those of the hardware's products."""
    y = yardsticks(name)
    a, of_cotangent = scaled.scaled(arrays(CASES[name], seed), where, factor)
    cotangent = np.array(y.cotangent)
    if of_cotangent:
        cotangent[..., 5] *= factor
        cotangent = cotangent.astype(np.float32).astype(np.float64)
    exact = y("exact", a, cotangent)
    given = jax.tree.map(np.float32, (a, cotangent))
    found = jax.tree.map(np.asarray, kernels(name, precision)(y.graph, *given))
    yardstick = y("tf32" if precision == "bf16" else precision, a, cotangent)
    pairs = [("result", found[0], exact[0], yardstick[0])]
    pairs += [(f"gradient of {k}", found[1][k], exact[1][k], yardstick[1][k]) for k in a]
    rows = ("result", "gradient of x", "gradient of m")
    by_column = lambda k, each, e: column_errors(each, e, of_rows=k in rows, by_feature=by_feature)  # noqa: E731
    return [(k, by_column(k, f, e).reshape(-1), by_column(k, t, e).reshape(-1)) for k, f, e, t in pairs]


def assert_near_hardware(name: str, precision: str, where: str, factor: float, only: str = "", **how: Any) -> None:
    """Checks each column: at most three times the error of hardware products there, or in their median column."""
    for what, found, hardware in errors(name, precision, where, factor, **how):
        if not what.startswith(only):
            continue
        allowed = 3 * np.maximum(np.maximum(hardware, np.median(hardware)), FLOOR[precision])
        worst = np.max(found / allowed)
        assert worst <= 1, f"{what}: {3 * worst:.1f} times the error of true {precision} products"


# Each program and precision compiles for seconds. `typed_sum` with tf32 is quick; the tests of scales share it.
@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but([("typed_sum", "tf32")], itertools.product(("typed_sum", "rgcn", "spread"), PROMISED)),
)
def test_bounds_of_the_precision_page(name: str, precision: str) -> None:
    for seed in range(2):
        for what, found, _ in errors(name, precision, "all", 1.0, seed):
            assert found.max() <= PROMISED[precision], f"{what}: {found.max():.1e}"


def test_jax_default_precision_is_that_of_a_program_without_one() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((40, 16), (3, 16, 16)))
    sources, types = rng.integers(0, 40, 90), rng.integers(0, 3, 90)
    graph = rgnn.RelGraph.from_edges(sources, np.arange(90) % 40, types, num_nodes=40)
    linear = rgnn.program(lambda g, x, w: g.src(x) @ g.per_edge_type(w), backend="pallas", interpret=True)
    want = np.einsum("ek,ekn->en", x[sources].astype(np.float64), w[types])

    def error_with(default: str | None, **options: str) -> float:
        with jax.default_matmul_precision(default):
            got = linear.with_options(**options)(graph, x, w)
        return np.linalg.norm(got - want) / np.linalg.norm(want)

    assert error_with("highest") < PROMISED["f32"] and error_with("float32") < PROMISED["f32"]
    for default, options in ((None, {}), ("highest", {"precision": "tf32"})):
        assert 1e-5 < error_with(default, **options) < PROMISED["tf32"]


WHERE = ("row", "column", "feature", "feature alone", "weights of a feature", "type", "all", "cotangent")
OF_COLUMNS = ("row", "feature", "feature of some columns", "feature alone", "type")
HEADS = ("row", "head", "feature", "feature of some columns", "type")
SMALL = (1e-12, 1e-6)
# Of each program and precision: what is scaled, and by what.
SCALED: list[tuple[str, str, str, tuple[float, ...]]] = [
    *(("typed_sum", "tf32", where, (factor,)) for where in WHERE for factor in SCALES),
    *(("rgcn", "tf32", where, SCALES) for where in WHERE),
    *(("typed_sum", "f32", where, SCALES) for where in ("row", "column", "type", "all", "cotangent")),
    *((name, "tf32", where, SCALES) for name in ("heads", "kept heads") for where in HEADS),
    # The columns of a product are as large as the weights, each times its feature.
    *((name, "tf32", where, SCALES) for name in ("typed_sum", "halves") for where in OF_COLUMNS),
    # Columns of the gradient of weights in which a large row is zero are sums of the other rows.
    ("masked", "tf32", "row with zeros", (*SCALES, 1e9)),
    # Scores stay in a range in which the softmax does not saturate.
    *(("rgat", "tf32", where, SMALL) for where in ("row", "column")),
    ("rgat", "tf32", "feature", (*SMALL, 1e6)),
    ("rgat", "tf32", "cotangent", SCALES),
]
QUICK = [
    *(("typed_sum", "tf32", where, SCALES[:1]) for where in WHERE),
    ("typed_sum", "tf32", "row", (1e12,)),
    ("typed_sum", "tf32", "feature of some columns", SCALES),
]


@pytest.mark.parametrize(("name", "precision", "where", "factors"), slow_but(QUICK, SCALED))
def test_scales_cost_no_accuracy(name: str, precision: str, where: str, factors: tuple[float, ...]) -> None:
    for factor in factors:
        by_feature = len(factors) > 1 and where.startswith("feature") and factor > 1 and name not in ("rgcn", "rgat")
        only = "gradient of w" if name == "masked" else ""
        assert_near_hardware(name, precision, where, factor, only, by_feature=by_feature)


@pytest.mark.parametrize(
    ("name", "disable"),
    slow_but(
        [("typed_sum", ("storage",))],
        itertools.product(("typed_sum", "heads", "kept heads", "halves", "rgcn", "rgat"), ((), ("storage",))),
    ),
)
def test_scales_of_products_with_many_rows(
    name: str, disable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are scaled before the kernel, and products are given the powers of the columns of their rows."""
    asked: dict[Any, set[tuple[int, ...]]] = {running: set(), grouped_gemm: set()}
    for module, seen in asked.items():
        monkeypatch.setattr(module, "scales_beforehand", lambda *sizes, seen=seen: bool(seen.add(sizes)) or True)
    monkeypatch.setattr(sys.modules[__name__], "kernels", cache(lambda name, precision: runner(
        CASES[name], Options(backend="pallas", precision=precision, interpret=True, disable=disable)
    )))  # fmt: skip
    jax.clear_caches()
    for where in ("row", "feature", "type") if name != "rgat" else ("row", "feature"):
        for factor in SCALES[:3] if name != "rgat" else SMALL:
            by_feature = where == "feature" and factor > 1 and name not in ("rgcn", "rgat")
            assert_near_hardware(name, "tf32", where, factor, by_feature=by_feature)
    assert asked[running] <= asked[grouped_gemm]
    assert bool(asked[running]) == bool(disable)
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("offset", [5.0, 10.0, 30.0])
def test_rows_of_a_difference_keep_their_accuracy(offset: float) -> None:
    """PNA's standard deviation: row-scaled float16 would lose all of its digits at an offset of 30."""
    y = yardsticks("spread")
    a = arrays(CASES["spread"])
    a["x"] = (a["x"] + offset).astype(np.float32).astype(np.float64)
    exact, hardware = y("exact", a, y.cotangent), y("tf32", a, y.cotangent)
    found = kernels("spread", "tf32")(y.graph, *jax.tree.map(np.float32, (a, y.cotangent)))
    norm = lambda x, e: np.linalg.norm(np.asarray(x, np.float64) - e) / np.linalg.norm(e)  # noqa: E731
    assert norm(found[0], exact[0]) <= 3 * norm(hardware[0], exact[0])
    for k in a:
        assert norm(found[1][k], exact[1][k]) <= 3 * norm(hardware[1][k], exact[1][k]), k


@pytest.mark.slow
def test_a_constant_feature_of_1000() -> None:
    """RGAT's gradient of features is that of true TF32 products."""
    found = {k: (np.linalg.norm(f), np.linalg.norm(h)) for k, f, h in errors("rgat", "tf32", "offset", 1000.0)}
    ours, hardware = found["gradient of x"]
    assert ours <= 3 * hardware


def test_the_gradient_of_a_maximum_beside_products() -> None:
    """A row is compared with the maximum of its neighbours bit for bit, though products would take both rounded."""
    rng = np.random.default_rng(1)
    edges = (rng.integers(0, count, 300) for count in (40, 40, 5))
    graph = rgnn.RelGraph.from_edges(*edges, num_nodes=40, num_edge_types=5)
    x, w = rng.normal(size=(40, 17)).astype(np.float32), rng.normal(size=(5, 17, 17)).astype(np.float32)

    @rgnn.program
    def layer(g: Any, x: Any, w: Any) -> Any:
        return g.sum_to_dst(g.src(x) @ g.per_edge_type(w)) + g.max_to_dst(g.src(x))

    def gradient(options: Options) -> Any:
        return jax.jit(jax.grad(lambda x: jnp.sum(layer(graph, x, w, options=options))))(x)

    want = gradient(Options(backend="xla"))
    found = gradient(Options(backend="pallas", precision="tf32", interpret=True))
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=2e-2)
