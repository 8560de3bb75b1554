"""Errors for functions of jax.numpy, jax.nn and numpy on values of a program, with the function to use instead."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterable

from dejax.rgnn.compiler.frontend.errors import ProgramError, fail, is_internal, is_library

# What to write instead of functions that rgnn does not have by the same name.
_OTHER = {
    "absolute": "rgnn.abs",
    "add": "x + y",
    "amax": "rgnn.max",
    "amin": "rgnn.min",
    "astype": "x.astype(dtype)",
    "atan2": "rgnn.arctan2",
    "concat": "rgnn.concatenate",
    "divide": "x / y",
    "einsum": "x @ w, rgnn.dot or (x * y).sum(axis)",
    "equal": "x == y",
    "exp2": "2 ** x",
    "expand_dims": "x[..., None]",
    "expit": "rgnn.sigmoid",
    "greater": "x > y",
    "hstack": "rgnn.concatenate",
    "inner": "rgnn.dot",
    "invert": "~x",
    "less": "x < y",
    "log_sigmoid": "-rgnn.softplus(-x)",
    "logical_and": "x & y",
    "logical_not": "~x",
    "logical_or": "x | y",
    "logistic": "rgnn.sigmoid",
    "matmul": "x @ w",
    "moveaxis": "x.transpose(*axes)",
    "multiply": "x * y",
    "negative": "-x",
    "norm": "rgnn.sqrt(rgnn.square(x).sum(axis))",
    "one_hot": "x[ids] to choose rows of a table",
    "power": "x ** y",
    "pow": "x ** y",
    "ravel": "x.reshape(-1)",
    "relu6": "rgnn.clip(x, 0, 6)",
    "reshape": "x.reshape(...)",
    "roll": "rgnn.concatenate([x[n:], x[:n]])",
    "segment_max": "g.max_to_dst, or g.max_by",
    "segment_sum": "g.sum_to_dst, or g.sum_by",
    "select": "rgnn.where",
    "split": "slices, x[:n] and x[n:]",
    "squeeze": "x[..., 0], or x.reshape(...)",
    "std": "rgnn.sqrt of the mean of rgnn.square(x - x.mean(keepdims=True))",
    "subtract": "x - y",
    "swish": "rgnn.silu",
    "take": "x[ids]",
    "tensordot": "x @ w",
    "swapaxes": "x.swapaxes(0, 1)",
    "transpose": "x.T or x.transpose(1, 0)",
    "true_divide": "x / y",
    "var": "the mean of rgnn.square(x - x.mean(keepdims=True))",
    "vstack": "rgnn.stack",
    "zeros_like": "0 * x",
}


def _ours(name: str) -> str | None:
    rgnn = sys.modules["dejax.rgnn"]  # which is above the front end, and has the public names
    return f"rgnn.{name}" if name in rgnn.functional.__all__ else _OTHER.get(name)


def instead_of(name: str) -> str:
    """The message for a function that does not take values of a program."""
    ours = _ours(name)
    if ours is None:
        remedy = "use those of rgnn (rgnn.exp, rgnn.where, rgnn.maximum, ...), or call it before or after the program"
    else:
        remedy = f"instead of {name} write {ours}"
    return f"functions of jax.numpy and jax.nn do not take values of a program; {remedy}"


def _first_known(names: Iterable[str], path: str, line: int) -> str:
    """The first name that has a replacement, among `names` and the functions on the user's line."""
    on_line = re.findall(r"\.(\w+)\(", linecache.getline(path, line))
    return next((name for name in (*names, *on_line) if _ours(name) is not None), "")


def error_of_caller() -> ProgramError:
    """The error for the function of JAX or NumPy that is converting a value to an array."""
    names = []
    frame = sys._getframe(1)
    while frame is not None and (is_internal(frame.f_code.co_filename) or is_library(frame.f_code.co_filename)):
        if is_library(frame.f_code.co_filename):
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    path, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return fail(instead_of(_first_known(reversed(names), path, line)))


def as_program_error(error: Exception) -> ProgramError | None:
    """A ProgramError for an error of JAX or NumPy that a value of a program caused; None for any other error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    paths = [frame.f_code.co_filename for frame, _ in frames]
    users = [at for at, path in enumerate(paths) if not is_library(path) and not is_internal(path)]
    words = ("not a valid JAX type", "as a JAX value", "frontend.symbols", "'Symbol'", "'Argument'")
    named = any(word in str(error) for word in words) or re.search(r"\b(Symbol|Argument)\b", str(error))
    if not users or not named:
        return None
    # JAX may have removed its frames, and NumPy's operators have none.
    unmistakable = any(word in str(error) for word in (*words[:2], "ufunc"))
    if not unmistakable and not any(is_library(path) for path in paths[users[-1] + 1 :]):
        return None
    found = re.findall(r"<function (\w+)|(\w+) requires|function (\w+)", str(error))
    names = [name for group in found for name in group if name]
    names += [frame.f_code.co_name for frame, _ in frames[users[-1] + 1 :]]
    path, line = paths[users[-1]], frames[users[-1]][1]
    return fail(instead_of(_first_known(names, path, line)), f"{path}:{line}")
