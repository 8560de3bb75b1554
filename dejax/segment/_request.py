"""What a call asks for: arguments checked, and where it is computed."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._dtypes import clipped_to_int32, native_order, numbers
from dejax._platform import on_gpu
from dejax.pallas import offsets_fit
from dejax.segment import _cost
from dejax.segment._grouping import Grouping, SegmentPlan, Unsorted, as_ids, group

BACKENDS = ("auto", "pallas", "xla")
FLOATS = tuple(jnp.dtype(t) for t in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
INTEGERS = tuple(jnp.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
_MODES = {None: "drop", "drop": "drop", "fill": "drop", "clip": "clip", "promise_in_bounds": "drop"}


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """The choices of a caller.

    Attributes:
        indices_are_sorted: the caller's word that ids ascend.
        unique_indices: the caller's word that no id occurs twice.
        bucket_size: for XLA.
        mode: `drop` or `clip`, for ids out of range.
        deterministic: whether equal calls must give equal bits also without a plan.
        backend: `auto`, `pallas` or `xla`.
    """

    indices_are_sorted: bool = False
    unique_indices: bool = False
    bucket_size: int | None = None
    mode: Any = None
    deterministic: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        mode = self.mode.name.lower() if isinstance(self.mode, jax.lax.GatherScatterMode) else self.mode
        mode = "drop" if mode == "fill_or_drop" else mode
        if mode not in _MODES:
            raise ValueError(
                f"`mode` must be one of 'drop', 'fill', 'clip', 'promise_in_bounds' or None, got {self.mode!r}; take "
                "ids modulo the number of segments to have them wrap around"
            )
        object.__setattr__(self, "mode", _MODES[mode])


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """A checked call.

    Attributes:
        data: an array with an entry for each id.
        ids: integer[entries].
        num_segments: number of segments.
        options: the choices of the caller.
        plan: None, or the plan that the caller gave.
        kernels: whether kernels may compute it, else XLA.
        interpret: whether kernels are interpreted.
        scattered: whether XLA's scatter is faster than a kernel, for this example alone.
    """

    data: Array
    ids: Array
    num_segments: int
    options: SegmentOptions
    plan: SegmentPlan | None
    kernels: bool
    interpret: bool
    scattered: bool = False

    @property
    def is_sorted(self) -> bool:
        return self.options.indices_are_sorted if self.plan is None else self.plan.order is None

    @property
    def width(self) -> int:
        return math.prod(self.data.shape[1:])

    @property
    def rows(self) -> Array:
        """The data as [entries, width]."""
        return self.data.reshape(self.data.shape[0], self.width)

    def shaped(self, out: Array) -> Array:
        """[segments or entries, width] with the axes of the data."""
        return out.reshape(out.shape[0], *self.data.shape[1:])

    def grouping(self) -> Grouping | Unsorted:
        if self.scattered:
            return Unsorted(self.ids, self.num_segments)
        if self.plan is not None:
            return self.plan.grouping
        return group(
            self.ids, self.num_segments, self.options.indices_are_sorted, kernels=True, interpret=self.interpret
        )


def request(
    name: str,
    data: Any,
    segment_ids: Any,
    num_segments: int | None,
    options: SegmentOptions,
    plan: SegmentPlan | None = None,
    kind: str = "sum",
) -> SegmentRequest:
    """Checks a call of `name`, an operator that reduces by `kind`."""
    if isinstance(segment_ids, SegmentPlan):
        segment_ids, plan = segment_ids.ids, plan or segment_ids
    data = numbers(f"`data` of {name}", data)
    if plan is not None:
        if options.mode == "clip":
            raise ValueError(
                f"`mode` of {name} must not be 'clip' with a plan, because a plan leaves out ids that are out of "
                "range, got 'clip'; clip the ids before they are given to `plan`"
            )
        segment_ids, num_segments = _of_plan(name, plan, segment_ids, num_segments)
    ids = as_ids(segment_ids)
    _check_entries(name, data, ids)
    count = count_of(name, segment_ids, num_segments)
    ids = clipped_to_int32(ids)
    if options.mode == "clip":
        ids = jnp.clip(ids, 0, jnp.maximum(count - 1, 0))
    kernels, interpret = place(options.backend, *data.shape, count)
    kernels = kernels and (data.dtype in FLOATS or data.dtype in INTEGERS)
    kernels = kernels and offsets_fit(data) and ids.shape[0] < 2**31  # positions have 32 bits
    if options.unique_indices and options.backend == "auto":
        kernels = False  # a scatter without collisions
    scattered = False
    if kernels and options.backend == "auto":
        shape = _cost.ReductionSize(ids.shape[0], count, math.prod(data.shape[1:]), data.dtype)
        in_order = options.indices_are_sorted if plan is None else plan.order is None
        scattered = _cost.scatter_pays(shape, kind, in_order, options.deterministic, plan is not None)
        kernels = not scattered or options.bucket_size is None  # that of XLA's scatter, which the caller has chosen
    return SegmentRequest(data, ids, count, options, plan, kernels, interpret, scattered)


def place(backend: str, *sizes: int) -> tuple[bool, bool]:
    """Whether kernels are used, which need all sizes of arrays as numbers, and whether they are interpreted.

    `jax.export` may leave sizes open (`jax.export.symbolic_shape`).
    """
    known = all(isinstance(size, int) for size in sizes)
    return known and (backend == "pallas" or (backend == "auto" and on_gpu())), not on_gpu()


def _of_plan(name: str, plan: SegmentPlan, ids: Any, count: int | None) -> tuple[Array, int]:
    if count is not None and int(count) != plan.num_segments:
        raise ValueError(
            f"`num_segments` of {name} must be that of the plan, {plan.num_segments}, got {count}; make another plan"
        )
    if ids is not None and jnp.shape(ids) != plan.ids.shape:
        raise ValueError(f"`segment_ids` of {name} must have the plan's shape {plan.ids.shape}, got {jnp.shape(ids)}")
    return plan.ids, plan.num_segments


def _check_entries(name: str, data: Array, ids: Array) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"`segment_ids` of {name} must be integers, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"`segment_ids` of {name} must have one axis, got shape {ids.shape}; flatten ids and data")
    if data.ndim == 0 or data.shape[0] != ids.shape[0]:
        raise ValueError(
            f"`data` of {name} must have an entry for each of the {ids.shape[0]} segment_ids on its first axis, got "
            f"shape {data.shape}"
        )


def count_of(name: str, ids: Any, num_segments: int | None) -> int:
    """The number of segments, of the greatest id where it is not given."""
    if num_segments is None:
        if isinstance(ids, jax.core.Tracer):
            raise ValueError(
                f"`num_segments` of {name}, the size of the result, must be given inside jax.jit, where the values of "
                "ids are not known, got None; give it as a Python number"
            )
        ids = np.asarray(ids)
        count = max(int(ids.max()) + 1, 0) if ids.size else 0
        if count >= 2**31 - 1:
            raise ValueError(
                f"`num_segments` of {name} must be given where ids are above 2^31 - 3, got None and the greatest id "
                f"{count - 1:,}"
            )
        return count
    if isinstance(num_segments, jax.core.Tracer):
        raise ValueError(
            f"`num_segments` of {name} must be a number that is known while tracing, because it is the size of the "
            "result, got a traced array; mark it with static_argnums, or take the size of an array"
        )
    if jax.export.is_symbolic_dim(num_segments):  # a size that `jax.export` leaves open
        return cast("int", num_segments)
    try:
        count = operator.index(num_segments)
    except TypeError:
        raise TypeError(f"`num_segments` of {name} must be an integer, got {num_segments!r}") from None
    if count < 0:
        raise ValueError(f"`num_segments` of {name} must be at least 0, got {count}")
    if count >= 2**31 - 1:
        raise ValueError(f"`num_segments` of {name} must be below 2^31 - 1, got {count}")
    return count


def constant(name: str, empty: Any, dtype: Any) -> Array:
    """The value of empty segments, in the dtype of the result."""
    value = native_order(empty) if isinstance(empty, jax.Array) else native_order(np.asarray(empty))
    if jnp.issubdtype(dtype, jnp.integer):
        if value.dtype != np.bool_ and not jnp.issubdtype(value.dtype, jnp.integer):
            if isinstance(value, jax.core.Tracer) or not (value == np.rint(value)).all():  # 0.0 is 0
                raise TypeError(f"`empty` of {name} must be an integer for data of {dtype}, got {empty!r}")
        bounds = jnp.iinfo(dtype)
        if not isinstance(value, jax.core.Tracer) and not ((value >= bounds.min) & (value <= bounds.max)).all():
            raise ValueError(f"`empty` of {name} must be from {bounds.min} to {bounds.max}, got {empty!r}")
    return jnp.asarray(value).astype(dtype)
