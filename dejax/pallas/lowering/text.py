"""A kernel's jaxpr, printed in Triton's language.

The kernels stay Pallas kernels: `pl.pallas_call` traces them, and interprets them on a CPU. What is printed here is
what Pallas' own lowering makes of the same jaxpr, operation by operation. Four things decide whether it is as fast:

- `reshape` loses what Triton's compiler knows of which elements lie next to each other in memory and in threads. Where
  only axes of size 1 come, `expand_dims` keeps it; where such go, a reduction does.
- A new axis comes behind a last axis of size 1 that a reduction has taken away, before that goes (`tiles`).
- A `while` that counts is printed as `for`: Triton neither pipelines a `while` nor moves changes of layout out of it.
- Offsets, which count elements, have 32 bits where an array has at most 2^31 of them.

Maxima and minima of floats are NaN where one of their operands is.
"""

from __future__ import annotations

import math
from typing import Any

import jax.experimental.pallas as pl

from dejax.pallas.lowering import control, memory, tiles
from dejax.pallas.lowering.printer import Printer, Reference

_PREAMBLE = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.jit
def _add(x, y):
    return x + y

@triton.jit
def _max(x, y):
    return tl.maximum(x, y)

@triton.jit
def _min(x, y):
    return tl.minimum(x, y)

@triton.jit
def _float_max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def _float_min(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
"""

_ELEMENTS_OF_32_BIT_OFFSETS = 2**31
_RULES = control.RULES | memory.RULES | tiles.RULES


def kernel_text(jaxpr: Any, grid_mapping: Any, name: str) -> str:
    """A module with the function `name`, whose parameters are pointers to the kernel's operands, then to its results.

    Its programs have one axis, of the product of the grid: a kernel's own axes first, then those that `vmap` added.

    Args:
      jaxpr: the jaxpr of the kernel, as a `pallas_call` equation has it.
      grid_mapping: the grid mapping of the same equation.
      name: an identifier.

    Raises:
      NotImplementedError: a primitive or a form of it that no kernel of dejax has; the message names it.
    """
    printer = Printer(_RULES)
    parameters = [f"r{i}" for i in range(len(jaxpr.invars))]
    ids = _program_ids(printer, grid_mapping)
    printer.program_ids = [id_ for axis, id_ in enumerate(ids) if axis not in grid_mapping.vmapped_dims]
    blocks = grid_mapping.block_mappings
    printer.equations(jaxpr, [_block(printer, p, b, ids) for p, b in zip(parameters, blocks, strict=True)])
    body = printer.lines or ["    pass"]
    return f"{_PREAMBLE}def {name}({', '.join(parameters)}):\n" + "\n".join(body) + "\n"


def _program_ids(printer: Printer, grid_mapping: Any) -> list[str]:
    """The index along each axis of the grid."""
    grid, mapped = grid_mapping.grid, grid_mapping.vmapped_dims
    fastest_first = [a for a in range(len(grid)) if a not in mapped] + list(reversed(mapped))
    rest, ids = printer.let("tl.program_id(0)"), [""] * len(grid)
    for axis in fastest_first[:-1]:
        ids[axis] = printer.let(f"{rest} % {grid[axis]}")
        rest = printer.let(f"{rest} // {grid[axis]}")
    ids[fastest_first[-1]] = rest
    return ids


def _block(printer: Printer, parameter: str, mapping: Any, ids: list[str]) -> str:
    """The pointer to the part of an array that a program sees: all of it, or with `vmap` one of its slices."""
    shape = mapping.array_aval.shape
    wide = math.prod(shape) > _ELEMENTS_OF_32_BIT_OFFSETS
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    squeezed = [isinstance(size, type(pl.squeezed)) for size in mapping.block_shape]
    sizes = [1 if s else getattr(n, "block_size", n) for s, n in zip(squeezed, mapping.block_shape, strict=True)]
    place = parameter
    for start, size, stride, length in zip(
        printer.equations(mapping.index_map_jaxpr, ids), sizes, strides, shape, strict=True
    ):
        if length % max(size, 1):
            raise NotImplementedError("a block of a kernel that ends beyond its array")
        if size != length:
            place += f" + {start}{'.to(tl.int64)' if wide else ''} * {size * stride}"
    place = place if place == parameter else printer.let(place)
    printer.references[place] = Reference([s for s, gone in zip(strides, squeezed, strict=True) if not gone], wide)
    return place
