"""Rules of what computes with tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dejax.pallas.lowering.printer import Printer, Rule
from dejax.pallas.lowering.shapes import (
    broadcast,
    expanded,
    inserted_axes,
    is_float,
    lanes,
    literal,
    merged_axes,
    reshaped,
    type_name,
)

# Text by primitive; a pair where the text for floats differs from that for integers and booleans.
_ELEMENTWISE: dict[str, str | tuple[str, str]] = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": ("{} / {}", "{} // {}"),
    "rem": "{} % {}",
    "max": ("tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)", "tl.maximum({}, {})"),
    "min": ("tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)", "tl.minimum({}, {})"),
    "and": "{} & {}",
    "or": "{} | {}",
    "xor": "{} ^ {}",
    "not": "~{}",
    "neg": ("{} * -1.0", "-{}"),  # triton 3.6 takes -x as 0 - x, which makes 0 of 0 in place of -0
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "shift_left": "{} << {}",
    "abs": "tl.abs({})",
    "square": "{0} * {0}",
    "one_minus_square": "(1 + {0}) * (1 - {0})",
    "logistic": "1 / (1 + libdevice.exp(-{}))",
    "add_any": "{} + {}",
    "stop_gradient": "{}",
    "maximum_with_nan": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum_with_nan": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "copy": "{}",
    "reshard": "{}",
}
# Functions of NVIDIA's device library; 16-bit floats are converted to float32 for them.
_LIBRARY = {
    **dict.fromkeys("exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt sin cos tan asin acos atan".split()),
    **dict.fromkeys("sinh cosh tanh asinh acosh atanh atan2 pow erf floor ceil nextafter".split()),
    "population_count": "popc",
    "clz": "clz",
}


def _elementwise(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    form, dtype = _ELEMENTWISE[equation.primitive.name], equation.outvars[0].aval.dtype
    of_floats, of_others = form if isinstance(form, tuple) else (form, form)
    text = (of_floats if is_float(dtype) else of_others).format(*values)
    if equation.primitive.name == "div" and is_float(dtype) and dtype.itemsize == 2:  # Triton divides in float32
        text = f"({text}).to({type_name(dtype)})"
    return [printer.let(text)]


def _library(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    narrow = is_float(dtype) and dtype.itemsize == 2
    operands = [f"{x}.to(tl.float32)" for x in values] if narrow else values
    call = f"libdevice.{_LIBRARY[name] or name}({', '.join(operands)})"
    return [printer.let(f"{call}.to({type_name(dtype)})" if narrow else call)]


def _clamp(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    least, x, most = values
    nan = ", propagate_nan=tl.PropagateNan.ALL" if is_float(equation.outvars[0].aval.dtype) else ""
    return [printer.let(f"tl.minimum(tl.maximum({x}, {least}{nan}), {most}{nan})")]


def _select(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    if len(values) > 3:
        raise NotImplementedError("select_n of more than two cases in a kernel")
    which, otherwise, then = values
    return [printer.let(f"tl.where({which}, {then}, {otherwise})")]


def _shift_right(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    """Triton shifts copies of the sign into signed numbers, and zeros into unsigned ones."""
    dtype, (x, y) = equation.outvars[0].aval.dtype, values
    kind = "uint" if equation.primitive.name == "shift_right_logical" else "int"
    shifted = f"tl.{kind}{8 * dtype.itemsize}"
    if shifted == type_name(dtype):
        return [printer.let(f"{x} >> {y}")]
    x, y = (f"{v}.to({shifted}, bitcast=True)" for v in values)
    return [printer.let(f"({x} >> {y}).to({type_name(dtype)}, bitcast=True)")]


def _sign(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    (x,), one = values, literal(1, equation.outvars[0].aval.dtype)
    return [printer.let(f"tl.where({x} > 0, {one}, tl.where({x} < 0, -{one}, {x}))")]  # NaN and zeros stay


def _is_finite(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    return [printer.let(f'tl.abs({values[0]}) < float("inf")')]


def _integer_pow(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    """Prints an integer power as repeated squarings and products."""
    exponent, power, product = abs(equation.params["y"]), values[0], ""
    while exponent:
        if exponent & 1:
            product = printer.let(f"{product} * {power}") if product else power
        exponent >>= 1
        power = printer.let(f"{power} * {power}") if exponent else power
    dtype = equation.outvars[0].aval.dtype
    one = literal(1, dtype)
    if not product:  # of infinities, too
        return [printer.let(f"tl.where({power} == {power}, {one}, {one})")]
    return [printer.let(f"{one} / {product}") if equation.params["y"] < 0 else product]


def _convert(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    bits = ", bitcast=True" if equation.primitive.name == "bitcast_convert_type" else ""
    return [printer.let(f"{values[0]}.to({type_name(equation.params['new_dtype'])}{bits})")]


def _instruction(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    return [printer.let(_assembly(equation.params["text"], ["f"] * len(values), values))]


def _assembly(text: str, registers: Sequence[str], values: Sequence[str], result: str = "f") -> str:
    """Assembly on each element of float32 tiles, which are in registers of these kinds."""
    constraints = ",".join([f"={result}", *registers])
    options = "dtype=tl.float32, is_pure=True, pack=1"
    return f"tl.inline_asm_elementwise({text!r}, {constraints!r}, [{', '.join(values)}], {options})"


# ------------------------------------------------------------------------------------------------ shapes


def _program_id(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    return [printer.program_ids[equation.params["axis"]]]


def _iota(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    p = equation.params
    cast = "" if p["dtype"] == np.int32 else f".to({type_name(p['dtype'])})"
    return [printer.let(lanes(p["shape"], p["dimension"]) + cast)]


def _broadcast_in_dim(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    shape, old = equation.params["shape"], equation.invars[0].aval.shape
    first = len(shape) - len(old)
    kept = equation.params.get("broadcast_dimensions", range(first, len(shape)))
    if not old or not shape:
        return [printer.let(reshaped(values[0], old, shape))]
    whole = dict(zip(kept, old, strict=True))
    x = _expanded(printer, values[0], [a for a in range(len(shape)) if a not in whole])
    return [printer.let(broadcast(x, [whole.get(a, 1) for a in range(len(shape))], shape))]


def _reshape(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    axes = inserted_axes(old, new) if old else None
    printer.merged |= merged_axes(old, new)
    return [printer.let(_expanded(printer, values[0], axes) if axes else reshaped(values[0], old, new))]


def _expanded(printer: Printer, x: str, axes: Sequence[int]) -> str:
    """`x` with axes of size 1 at these places of the result.

    Where a reduction has taken a last axis of size 1 away, the new ones come first, behind that axis. Triton arranges a
    tile by the axes that its reductions have left. A row of features that had lost its third axis of four, and a number
    of the row that had lost its third one and got another, were arranged otherwise; the number's way won, with all of
    the row in each thread.
    """
    if x not in printer.squeezed:
        return expanded(x, axes)
    wide, axis, combined = printer.squeezed[x]
    place = before = 0
    while before < axis:
        before += place not in axes
        place += 1
    return f"tl.reduce({expanded(wide, [a + (a >= place) for a in axes])}, {place}, {combined})"


def _transpose(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    return [printer.let(f"tl.permute({values[0]}, {tuple(equation.params['permutation'])})")]


_COMBINED = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}
_COMBINED |= {"maximum_with_nan_along": "max", "minimum_with_nan_along": "min"}


def _reduce(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    """Prints a reduction over several axes: one axis after the other, the last one first."""
    combined, (x,) = _COMBINED[equation.primitive.name], values
    kind = "float_" if combined != "add" and is_float(equation.outvars[0].aval.dtype) else ""
    shape = list(equation.invars[0].aval.shape)
    for axis in sorted(equation.params["axes"], reverse=True):
        x, count = _with_parts(printer, x, shape, axis)
        for part in reversed(range(count)):
            reduced = printer.let(f"tl.reduce({x}, {axis + part}, _{kind}{combined})")
            if shape[axis:] == [1]:
                printer.squeezed[reduced] = x, axis, f"_{kind}{combined}"
            x = reduced
        del shape[axis]
    return [x]


def _with_parts(printer: Printer, x: str, shape: Sequence[int], axis: int) -> tuple[str, int]:
    """`x` with an axis divided into those of which a reshape may have merged it, and their number.

    The threads along such an axis need not be neighbours: between those of heads and those of features there may be
    some that hold the same numbers again. Triton 3.6 takes them for neighbours and reduces numbers of other threads.
    """
    parts = printer.merged.get(shape[axis])
    if parts is None:
        return x, 1
    return f"tl.reshape({x}, {(*shape[:axis], *parts, *shape[axis + 1 :])})", len(parts)


def _dot(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    p = equation.params
    ((axis_x,), (axis_y,)), batch = p["dimension_numbers"]
    if batch != ((), ()):
        raise NotImplementedError("dot_general with batch axes in a kernel")
    exact = p["precision"] is not None and jax.lax.Precision.HIGHEST in p["precision"]
    operands = list(values)
    if equation.invars[0].aval.dtype == np.float32 and not exact:
        operands = [_to_tf32(x) for x in values]
    x = operands[0] if axis_x == 1 else f"tl.permute({operands[0]}, (1, 0))"
    y = operands[1] if axis_y == 0 else f"tl.permute({operands[1]}, (1, 0))"
    options = f"input_precision={'ieee' if exact else 'tf32'!r}, out_dtype={type_name(equation.outvars[0].aval.dtype)}"
    return [printer.let(f"tl.dot({x}, {y}, {options})")]


def _to_tf32(x: str) -> str:
    """Prints the rounding to TF32's mantissa. Tensor cores would cut off the further bits, with twice the error."""
    return _assembly("cvt.rna.tf32.f32 $0, $1;", ["r"], [x], "r")


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_LIBRARY, _library),
    "clamp": _clamp,
    "select_n": _select,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right,
    "sign": _sign,
    "is_finite": _is_finite,
    "integer_pow": _integer_pow,
    "convert_element_type": _convert,
    "bitcast_convert_type": _convert,
    "kernel_instruction": _instruction,
    "program_id": _program_id,
    "iota": _iota,
    "broadcast_in_dim": _broadcast_in_dim,
    "broadcast_to": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    **dict.fromkeys(_COMBINED, _reduce),
    "dot_general": _dot,
}
