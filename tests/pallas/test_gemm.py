"""Grouped GEMM and grouped weight gradient, interpreted, where a case of the contract does not show it."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.pallas.formats.row_scaled import encode
from dejax.pallas.products import grouped_gemm, reference
from dejax.pallas.products.product_schedule import WeightGradientSchedule, gemm_block
from tests.cases import slow_but
from tests.pallas.reference import (
    Gemm,
    WeightGradient,
    assert_close,
    decoded,
    interpreted,
)


@pytest.mark.parametrize("operand", slow_but(["all"], ["x", "w", "dot_vector", "all"]))
def test_grouped_gemm_vmap(operand):
    case = Gemm(counts=(5, 3), rows=4, k=3, n=2, dot_vector=True)
    samples = [case.arrays(seed) for seed in (0, 1, 2)]
    floats = ["x", "w", "dot_vector"]
    batched = floats if operand == "all" else [operand]
    stacked = {n: np.stack([s[n] for s in samples]) if n in batched else v for n, v in samples[0].items()}
    run = interpreted(jax.vmap(case.run, in_axes=({n: 0 if n in batched else None for n in stacked},)))
    y, dot = run(stacked)
    for i, s in enumerate(samples):
        case.check((y[i], dot[i]), {n: s[n] if n in batched else v for n, v in samples[0].items()})


@pytest.mark.slow
@pytest.mark.parametrize("operand", ["x", "y"])
def test_grouped_weight_gradient_vmap(operand):
    case = WeightGradient(counts=(5, 3), k=3, n=2, rows_per_split=4)
    samples = [case.arrays(seed) for seed in (0, 1)]
    stacked = {n: np.stack([s[n] for s in samples]) if n == operand else v for n, v in samples[0].items()}
    total = interpreted(jax.vmap(case.run, in_axes=({n: 0 if n == operand else None for n in stacked},)))(stacked)
    for i, s in enumerate(samples):
        case.check(total[i], {n: s[n] if n == operand else v for n, v in samples[0].items()})


def test_rows_out_of_range_are_neither_read_nor_written():
    case = Gemm(counts=(6,), rows=4, k=2, n=2, heads=1, precision="f32")
    a = case.arrays()
    a["x_index"] = np.array([0, 1, 4, -1, 2, 1000], np.int32)
    a["out_index"] = np.array([0, 1, 2, 3, -1, 99], np.int32)
    y = np.asarray(interpreted(case.run)(a))
    assert np.all(y[2:] == 0)
    np.testing.assert_allclose(y[:2, 0], a["x"][:2, 0] @ a["w"][0, 0], rtol=1e-5, atol=1e-6)


def test_results_with_parts_of_several_widths_stay_float32_and_whole(monkeypatch):
    """A result of 300 columns is not row-scaled, so it must not be divided by the powers of two of its columns."""
    monkeypatch.setattr(grouped_gemm, "scales_beforehand", lambda *_: True)
    case = Gemm(counts=(5, 4), rows=6, k=16, n=300, heads=1, gather=False, scatter=False, scaled_out=True)
    a = case.arrays()
    request = case.request(a)
    columns = jnp.full((1, 300), 2.0**10)
    output = dataclasses.replace(request.output, columns=columns)
    request = dataclasses.replace(request, x_columns=jnp.ones((1, 16)), output=output)
    case.check(kernels.grouped_gemm(request), a)


_WITH_COLUMNS = {
    "float32": Gemm(heads=None, k=20, n=17, scaled_out=True),
    "row-scaled": Gemm(heads=None, k=20, n=17, scaled_in=True, scaled_out=True),
    "heads merged": Gemm(heads=4, k=5, n=7, counts=(9, 2), scaled_out=True),
    "transposed, dot": Gemm(heads=None, transpose_w=True, scaled_out=True, dot_vector=True),
    "bias": Gemm(heads=None, bias=True, scaled_out=True),
    "relu, dot": Gemm(heads=2, activation="relu", scaled_out=True, dot_vector=True),
    "large tiles": Gemm(heads=None, k=20, n=128, block=128, scaled_out=True),
    "large tiles, row-scaled, dot": Gemm(
        heads=None, k=20, n=100, block=128, scaled_in=True, scaled_out=True, dot_vector=True
    ),
    "f32 products": Gemm(heads=None, precision="f32"),
}


@pytest.mark.parametrize(
    ("name", "beforehand"),
    slow_but(
        [("bias", False), ("large tiles, row-scaled, dot", True)], itertools.product(_WITH_COLUMNS, (False, True))
    ),
)
def test_columns_of_all_scales(name, beforehand, monkeypatch):
    """Each column is as exact as with one scale, also next to a column of infinities."""
    if beforehand:
        monkeypatch.setattr(grouped_gemm, "scales_beforehand", lambda *_: True)
    case, rng = _WITH_COLUMNS[name], np.random.default_rng(1)
    a = case.arrays()

    @interpreted
    def run(a, of_x, of_y):
        x = encode(a["x"], columns=of_x) if case.scaled_in else a["x"]
        request = case.request(a | {"x": x})
        output = dataclasses.replace(request.output, columns=of_y if case.scaled_out else None)
        columns = None if case.scaled_in else of_x
        return kernels.grouped_gemm(dataclasses.replace(request, x_columns=columns, output=output), interpret=True)

    of_x = 2.0 ** rng.integers(-30, 30, size=a["x"].shape[1:])
    of_y = 2.0 ** rng.integers(-30, 30, size=(*of_x.shape[:-1], case.n))
    a["x"] = np.float32(a["x"] * of_x)
    turned = (lambda w: w.swapaxes(-1, -2)) if case.transpose_w else lambda w: w
    w = turned(a["w"]) / of_x[..., :, None] * of_y[..., None, :]
    a |= {name: np.float32(a[name] * of_y) for name in ("bias",) if name in a}
    a |= {name: np.float32(a[name] / of_y) for name in ("dot_vector",) if name in a}
    of_x, of_y = np.float32(of_x), np.float32(of_y)
    for infinite in (False, True):
        if infinite:
            w[..., 0] = np.inf
        a["w"] = np.float32(turned(w))
        found = run(a, of_x, of_y)
        y, dot = found if case.dot_vector else (found, None)
        y = np.asarray(decoded(y) if isinstance(y, kernels.RowScaled) else y)
        with np.errstate(invalid="ignore"):
            want, want_dot = reference.grouped_gemm(case.request(a))
        finite = slice(1 if infinite else 0, None)
        assert_close((y / of_y)[..., finite], (want / of_y)[..., finite], False, 2e-3)
        if dot is not None and not infinite:
            assert_close(dot, want_dot, False, 2e-3)


@pytest.mark.parametrize("shape", [{"counts": ()}, {"counts": (0,)}, {"counts": (0, 0)}])
def test_no_positions(shape):
    case = Gemm(**shape)
    a = case.arrays()
    case.check(case.run(a), a)
    gradient = WeightGradient(**shape)
    b = gradient.arrays()
    gradient.check(gradient.run(b), b)


@pytest.mark.parametrize(
    ("row_scaled", "powers"),
    slow_but(
        [((), "of both against each other")],
        itertools.product([(), ("x", "y")], ("rising", "falling", "of both against each other", "random")),
    ),
)
def test_weight_gradients_of_rows_of_all_magnitudes(powers, row_scaled):
    """Sums have the largest power of two so far as their unit, in steps of 16 positions; small rows keep their bits."""
    case = WeightGradient(
        counts=(90, 0, 110), k=20, n=18, heads=None, gather=False, rows_per_split=64, row_scaled=row_scaled
    )
    a, rng = case.arrays(), np.random.default_rng(0)
    line = np.linspace(-60, 60, case.positions)
    of_x, of_y = {
        "rising": (line, 0 * line),
        "falling": (line[::-1], 0 * line),
        "of both against each other": (line * 1.6, line[::-1] * 1.6),
        "random": rng.uniform(-20, 20, (2, case.positions)),
    }[powers]
    for name, power in (("x", of_x), ("y", of_y)):
        a[name] = (a[name] * 2.0 ** power[:, None]).astype(np.float32)
    schedule = WeightGradientSchedule(16, 32, 32, 4, 1)
    magnitudes = a | {name: np.abs(a[name]) for name in ("x", "y")}
    found = interpreted(functools.partial(case.run, schedule=schedule))(a)
    expected, limit = (reference.grouped_weight_gradient(case.request(b)) for b in (a, magnitudes))
    assert np.all(np.abs(np.asarray(found, np.float64) - expected) <= 2e-3 * limit)


@pytest.mark.parametrize(
    "error, match, fields, arrays",
    [
        (ValueError, "precision must be one of f32, tf32, bf16", {"precision": "f16"}, {}),
        (ValueError, "`block` must be a power of two of at least 16, got 8", {"block": 8}, {}),
        (ValueError, "`w` must have 1 heads and a contracted width of 17", {}, {"w": np.ones((1, 3, 17), np.float32)}),
        (ValueError, r"x_index must have shape \(5,\)", {"padding": 1}, {}),
        (NotImplementedError, "x must be float32, bfloat16 or float16", {}, {"x": np.ones((13, 17), np.int32)}),
        (NotImplementedError, "`activation` must be None", {"activation": "gelu"}, {}),
        (TypeError, "x_index must be integers", {}, {"x_index": np.zeros(4, np.float32)}),
    ],
)
def test_errors_say_what_to_do(error, match, fields, arrays):
    case = Gemm(counts=(4,), heads=None)
    a = case.arrays()
    with pytest.raises(error, match=match):
        dataclasses.replace(case, **fields).run(a | arrays)


def test_gradient_through_a_template_is_an_error():
    case = Gemm(counts=(4,))
    a = case.arrays()
    with pytest.raises(NotImplementedError, match="grouped_gemm has no derivative of its own"):
        jax.grad(lambda x: jnp.sum(case.run(a | {"x": x})))(jnp.asarray(a["x"]))


@pytest.mark.parametrize("positions, types, expected", [(10, 3, 32), (300, 3, 64), (10_000, 3, 64), (100_000, 3, 128)])
def test_gemm_block(positions, types, expected):
    assert gemm_block(64, 64, positions, types) == expected
    assert gemm_block(64, 64, positions, types, "f32") == min(expected, 64)
