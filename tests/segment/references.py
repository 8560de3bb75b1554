"""Segment operators in numpy, random cases of them, and the comparison of a backend with numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax import segment

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
ORDERS = ("unsorted", "sorted", "plan", "traced plan")
KINDS = ("sum", "mean", "max", "min", "softmax", "logsumexp")
BACKENDS = ("xla", "pallas")

# One rounding of the result, and of the float32 that it was accumulated in.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22, "float64": 2.0**-50}


@dataclass(frozen=True, slots=True)
class Case:
    """Random entries of so many segments; `skew` is the share of entries in segment 0, `outside` of those in none."""

    entries: int = 70
    segments: int = 5
    shape: tuple[int, ...] = (3,)
    dtype: str = "float32"
    order: str = "unsorted"
    ids: str = "int32"
    skew: float = 0.0
    outside: float = 0.2
    spread: float = 1.0

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Data and ids."""
        rng = np.random.default_rng(seed)
        n = self.segments
        ids = rng.integers(0, max(n, 1), self.entries)
        ids[rng.random(self.entries) < self.skew] = 0
        signed = not self.ids.startswith("u")
        away = rng.choice([-1, -n - 3, n, n + 7] if signed else [n, n + 7], self.entries)
        ids = np.where((rng.random(self.entries) < self.outside) | (n == 0), away, ids)
        ids = ids.astype(self.ids)
        if self.order == "sorted":
            ids = np.sort(ids)
        values = rng.normal(size=(self.entries, *self.shape)) * 10.0 ** (
            rng.integers(-2, 3, self.entries) * self.spread
        )[(..., *(None,) * len(self.shape))].astype(float)
        if self.dtype in INTEGERS:
            info = np.iinfo(self.dtype)
            values = rng.integers(info.min, info.max, values.shape, self.dtype, endpoint=True)
        elif self.dtype == "bool":
            values = values > 0
        return values.astype(jnp.dtype(self.dtype)), ids


def reference(kind: str, data: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """In float64, or in the dtype of integers."""
    inside = (ids.astype(np.int64) >= 0) & (ids.astype(np.int64) < count)
    exact = data.dtype.kind in "iub" and kind in ("sum", "max", "min")
    x = data if exact else data.astype(np.float64)
    kept, at = x[inside], ids[inside].astype(np.int64)
    out = np.zeros((count, *x.shape[1:]), x.dtype)
    if kind == "sum":
        np.add.at(out, at, kept)
        return out
    if kind == "mean":
        np.add.at(out, at, kept)
        number = np.bincount(at, minlength=count).reshape(-1, *(1,) * (x.ndim - 1))
        return out / np.maximum(number, 1)
    if kind in ("max", "min"):
        out[...] = _empty(kind, x.dtype)
        (np.maximum if kind == "max" else np.minimum).at(out, at, kept)
        return out
    top = np.full(out.shape, -np.inf)
    np.maximum.at(top, at, kept)
    top = np.where(np.isfinite(top), top, 0)
    power = np.exp(kept - top[at])
    np.add.at(out, at, power)
    if kind == "logsumexp":
        with np.errstate(divide="ignore"):
            return np.log(out) + top
    found = np.zeros(x.shape)
    found[inside] = power / out[at]
    return found


def _empty(kind: str, dtype: Any) -> Any:
    if dtype.kind == "b":
        return kind == "min"
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if kind == "max" else np.iinfo(dtype).max
    return -np.inf if kind == "max" else np.inf


def run(kind: str, case: Case, data: Any, ids: Any, backend: str) -> jax.Array:
    """The operator, with ids as the case's order has them."""
    operator = getattr(segment, f"segment_{kind}")
    count = case.segments
    data, ids = jnp.asarray(data), jnp.asarray(ids)
    if case.order == "plan":
        return operator(data, segment.plan(ids, count, backend=backend), backend=backend)
    if case.order == "traced plan":
        return jax.jit(lambda d, i: operator(d, i, plan=segment.plan(i, count, backend=backend), backend=backend))(
            data, ids
        )
    return operator(data, ids, count, case.order == "sorted", backend=backend)


def check(kind: str, case: Case, backend: str, seed: int = 0) -> None:
    """The operator against numpy, under 64 bits where the case needs them."""
    with jax.enable_x64("64" in case.dtype + case.ids):
        data, ids = case.arrays(seed)
        found = run(kind, case, data, ids, backend)
        want = reference(kind, data, ids, case.segments)
        compare(kind, np.asarray(found), data, want, case)


def compare(kind: str, found: np.ndarray, data: np.ndarray, want: np.ndarray, case: Case) -> None:
    """Exactly for integers and extrema; else one rounding, and the cancellation that float32 has in a sum."""
    assert found.shape == want.shape
    if kind in ("sum", "max", "min"):
        assert found.dtype == data.dtype
    if kind in ("max", "min") or (kind == "sum" and case.dtype in INTEGERS):
        np.testing.assert_array_equal(found.astype(want.dtype), want)
        return
    dtype = case.dtype if case.dtype in FLOATS else "float64" if jax.config.jax_enable_x64 else "float32"
    # Logits round before they are exponents.
    large = 16 * max(1.0, float(np.abs(np.where(np.isfinite(want), want, 0)).max(initial=0)))
    size = np.abs(data.astype(np.float64)).sum(axis=0, keepdims=True) if kind in ("sum", "mean") else large
    tolerance = ROUNDING[dtype] * np.abs(want) + (ROUNDING["float64" if dtype == "float64" else "float32"]) * size
    got = found.astype(np.float64)
    smallest = 2.0**-24 if dtype == "float16" else 0  # its numbers end there
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.abs(got - want) <= tolerance + smallest)
    too_large = (np.abs(want) > 65_000) & np.isinf(got) if dtype == "float16" else False
    assert np.all(same | too_large), float(np.nanmax(np.where(same, 0, np.abs(got - want))))


# Reductions of gathered rows.
ROWS, RECEIVERS, EDGES = 11, 7, 300
SCALES = {"none": None, "edge": (), "edge, with an axis": (1, 1), "head": (2,), "feature": (2, 3)}


def edges(scale: str = "edge", dtype: str = "float32", is_sorted: bool = False) -> tuple[jax.Array, ...]:
    """Rows, senders, receivers and scales, with edges from and to nowhere and a long segment."""
    rng = np.random.default_rng(3)
    senders, receivers = rng.integers(-1, ROWS + 1, EDGES), rng.integers(-1, RECEIVERS + 1, EDGES)
    receivers[: EDGES // 2] = 2
    receivers = np.sort(receivers) if is_sorted else receivers
    x = jnp.asarray(rng.normal(size=(ROWS, 2, 3)).astype(jnp.dtype(dtype)))
    shape = SCALES[scale]
    scales = None if shape is None else jnp.asarray(rng.normal(size=(EDGES, *shape)).astype(jnp.dtype(dtype)))
    return x, jnp.asarray(senders), jnp.asarray(receivers), scales


def gathered(kind: str, x: Any, senders: Any, receivers: Any, scale: Any, backend: str = "pallas", **options: Any):
    operator = getattr(segment, f"gather_segment_{kind}")
    return operator(x, senders, receivers, RECEIVERS, scale, backend=backend, **options)


def gathered_reference(kind: str, x: Any, senders: Any, receivers: Any, scale: Any) -> tuple[np.ndarray, Any]:
    """The result in float64, and the function that takes its cotangent to those of rows and scales."""
    x, senders, receivers = np.asarray(x, np.float64), np.asarray(senders), np.asarray(receivers)
    known = np.flatnonzero((senders >= 0) & (senders < ROWS) & (receivers >= 0) & (receivers < RECEIVERS))
    to = receivers[known]
    rows = x[senders[known]]
    by = np.ones(EDGES) if scale is None else np.asarray(scale, np.float64)
    by = by.reshape(EDGES, *by.shape[1:3], *(1,) * (3 - by.ndim))[known]
    messages = rows * by
    out = reference(kind, messages, to, RECEIVERS)

    def pull(cotangent: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        of_messages = cotangent[to]
        if kind == "mean":
            of_messages = of_messages / np.bincount(to, minlength=RECEIVERS)[to][:, None, None]
        elif kind != "sum":
            largest = messages == out[to]  # equal ones share the cotangent
            sharing = np.zeros(out.shape)
            np.add.at(sharing, to, largest)
            of_messages = np.where(largest, of_messages / np.maximum(sharing, 1)[to], 0)
        of_rows = np.zeros(x.shape)
        np.add.at(of_rows, senders[known], of_messages * by)
        if scale is None:
            return of_rows, None
        of_scale = np.zeros((EDGES, *by.shape[1:]))
        axes = tuple(a for a in (1, 2) if by.shape[a] == 1)
        of_scale[known] = (of_messages * rows).sum(axes, keepdims=True)
        return of_rows, of_scale.reshape(scale.shape)

    return out, pull


def check_gathered(kind: str, scale: str, backend: str, order: str = "unsorted") -> None:
    """Values and gradients of an operator on gathered rows against numpy, in float64."""
    with jax.enable_x64(True):
        x, senders, receivers, scales = edges(scale, "float64", order == "sorted")
        plan = segment.edge_plan(senders, receivers, ROWS, RECEIVERS, backend=backend) if order == "plan" else None
        options = {"plan": plan, "indices_are_sorted": order == "sorted"}
        out, pull = jax.vjp(lambda x, s: gathered(kind, x, senders, receivers, s, backend, **options), x, scales)
        want, pull_reference = gathered_reference(kind, x, senders, receivers, scales)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
        cotangent = np.cos(np.arange(want.size)).reshape(want.shape)
        for found, right in zip(pull(jnp.asarray(cotangent)), pull_reference(cotangent), strict=True):
            assert (found is None) == (right is None)
            if right is not None:
                np.testing.assert_allclose(found, right, rtol=1e-11, atol=1e-11)
