"""Triton's language as far as printed kernels use it, in numpy: one program after the other."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


class Tile(np.ndarray):
    """An array of any rank, which stays one in arithmetic."""

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        return tile(np.ascontiguousarray(self).view(dtype).reshape(self.shape) if bitcast else self.astype(dtype))

    def __floordiv__(self, other: Any) -> Tile:  # rounds towards zero
        x, y = np.asarray(self), np.asarray(other)
        return tile((np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(x.dtype))

    def __mod__(self, other: Any) -> Tile:
        return tile(np.fmod(self, other))

    def __invert__(self) -> Tile:
        return tile(np.invert(np.asarray(self)))


def tile(x: Any) -> Tile:
    return np.asarray(x).view(Tile)


class Pointers:
    """Places in the elements of an array."""

    def __init__(self, elements: np.ndarray, offsets: Any = 0) -> None:
        self.elements, self.offsets = elements, offsets

    def __add__(self, offsets: Any) -> Pointers:
        return Pointers(self.elements, np.asarray(self.offsets, np.int64) + np.asarray(offsets))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The offsets and the mask in one shape, after a check that no access is out of bounds."""
        offsets, mask = np.broadcast_arrays(self.offsets, True if mask is None else np.asarray(mask))
        assert ((offsets >= 0) & (offsets < self.elements.size))[mask].all(), "an access out of bounds"
        return np.where(mask, offsets, 0), mask


def _load(at: Pointers, mask: Any = None, other: Any = None) -> Tile:
    offsets, mask = at.places(mask)
    dtype = at.elements.dtype
    if not mask.any():
        return tile(np.broadcast_to(np.asarray(0 if other is None else other, dtype), mask.shape))
    found = at.elements[offsets]
    return tile(found if other is None else np.where(mask, found, np.asarray(other)).astype(dtype))


def _store(at: Pointers, value: Any, mask: Any = None) -> None:
    offsets, mask = at.places(mask)
    at.elements[offsets[mask]] = np.broadcast_to(np.asarray(value), mask.shape)[mask]


def _atomic_add(at: Pointers, value: Any, mask: Any = None) -> Tile:
    offsets, mask = at.places(mask)
    before = at.elements[offsets]
    np.add.at(at.elements, offsets[mask], np.broadcast_to(np.asarray(value), mask.shape)[mask])
    return tile(before)


def _reduce(x: Tile, axis: int, combine: Callable[[Any, Any], Any]) -> Tile:
    parts = [tile(np.take(np.asarray(x), i, axis)) for i in range(x.shape[axis])]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [combine(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def _assembly(text: str, constraints: str, values: Sequence[Tile], **_: Any) -> Tile:
    x = [np.asarray(v, np.float64) for v in values]
    if text.startswith("cvt.rna.tf32"):
        bits = np.asarray(values[0], np.float32).view(np.uint32) + np.uint32(0x1000)
        return tile((bits & np.uint32(0xFFFFE000)).view(np.float32))
    found = {"fma.rn.f32": lambda: x[0] * x[1] + x[2], "ex2.approx.ftz.f32": lambda: np.exp2(x[0])}[text.split()[0]]()
    return tile(found.astype(np.float32))


def _of(function: Callable[..., Any]) -> Callable[..., Tile]:
    return lambda *args, **_: tile(function(*map(np.asarray, args)))


def _dot(x: Tile, y: Tile, input_precision: str, out_dtype: Any) -> Tile:
    return tile((np.asarray(x, np.float64) @ np.asarray(y, np.float64)).astype(out_dtype))


_DTYPES = {f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_DTYPES |= {f"float{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)}
_DTYPES |= {"int1": np.dtype(bool), "bfloat16": jnp.dtype(jnp.bfloat16)}


def run(text: str, name: str, programs: int, arrays: Sequence[np.ndarray]) -> None:
    """Runs the programs of a printed kernel on arrays, some of which it writes."""
    here = [0]
    language = types.SimpleNamespace(
        program_id=lambda axis: tile(np.int32(here[0])),
        full=lambda shape, value, dtype: tile(np.full(shape, value, dtype)),
        arange=lambda start, end: tile(np.arange(start, end, dtype=np.int32)),
        expand_dims=lambda x, axes: tile(np.expand_dims(np.asarray(x), axes)),
        broadcast_to=lambda x, shape: tile(np.broadcast_to(np.asarray(x), shape)),
        reshape=lambda x, shape: tile(np.reshape(np.asarray(x), shape)),
        permute=lambda x, axes: tile(np.transpose(np.asarray(x), axes)),
        where=lambda mask, x, y: tile(np.where(mask, x, y)),
        maximum=_of(np.maximum), minimum=_of(np.minimum), abs=_of(np.abs),
        PropagateNan=types.SimpleNamespace(ALL=None), debug_barrier=lambda: None, dot=_dot, reduce=_reduce,
        load=_load, store=_store, atomic_add=_atomic_add, inline_asm_elementwise=_assembly, **_DTYPES,
    )  # fmt: skip
    library = types.SimpleNamespace(
        **{f: _of(getattr(np, f)) for f in "exp exp2 expm1 log log2 log1p sqrt sin cos tan tanh floor ceil".split()},
        rsqrt=_of(lambda x: 1 / np.sqrt(x)), pow=_of(np.power), erf=_of(np.vectorize(math.erf)),
    )  # fmt: skip
    body = "\n".join(line for line in text.splitlines() if "import" not in line)
    names: dict[str, Any] = {"tl": language, "libdevice": library, "triton": types.SimpleNamespace(jit=lambda f: f)}
    exec(compile(body, name, "exec"), names)
    with np.errstate(all="ignore"):
        for here[0] in range(programs):
            names[name](*(Pointers(a.reshape(-1)) for a in arrays))
