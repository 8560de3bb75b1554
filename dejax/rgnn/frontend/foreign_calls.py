"""Functions of jax.numpy, jax.nn and numpy that are called on values of a program: what to write instead."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import jax
import numpy as np

from dejax.rgnn.frontend.errors import ProgramError, fail, is_internal

_FOREIGN = (str(Path(jax.__file__).parent), str(Path(np.__file__).parent))
# Functions that rgnn has by the same name.
_SAME = frozenset(
    "abs arctan2 clip concatenate cos dot elu erf exp expm1 gelu leaky_relu log log1p log_softmax logsumexp max "
    "maximum mean min minimum reciprocal relu rsqrt sigmoid sign silu sin softmax softplus sqrt square stop_gradient "
    "sum tanh where".split()
)
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
    "multiply": "x * y",
    "negative": "-x",
    "norm": "rgnn.sqrt(rgnn.square(x).sum(axis))",
    "one_hot": "x[ids] to choose rows of a table",
    "power": "x ** y",
    "pow": "x ** y",
    "relu6": "rgnn.clip(x, 0, 6)",
    "reshape": "x.reshape(...)",
    "segment_max": "g.max_to_dst, or g.max_by",
    "segment_sum": "g.sum_to_dst, or g.sum_by",
    "select": "rgnn.where",
    "split": "slices, x[:n] and x[n:]",
    "squeeze": "x[..., 0], or x.reshape(...)",
    "stack": "rgnn.concatenate of x[None] and y[None]",
    "std": "rgnn.sqrt of the mean of rgnn.square(x - x.mean(keepdims=True))",
    "subtract": "x - y",
    "swish": "rgnn.silu",
    "take": "x[ids]",
    "tensordot": "x @ w",
    "transpose": "x.T",
    "true_divide": "x / y",
    "var": "the mean of rgnn.square(x - x.mean(keepdims=True))",
    "zeros_like": "0 * x",
}


def _ours(name: str) -> str | None:
    return f"rgnn.{name}" if name in _SAME else _OTHER.get(name)


def instead_of(name: str) -> str:
    """What an error says of a function that does not take values of a program."""
    ours = _ours(name)
    if ours is None:
        remedy = "use those of rgnn (rgnn.exp, rgnn.where, rgnn.maximum, ...), or call it before or after the program"
    else:
        remedy = f"instead of {name} write {ours}"
    return f"functions of jax.numpy and jax.nn do not take values of a program; {remedy}"


def as_program_error(error: Exception) -> ProgramError | None:
    """The error of a function of JAX's or NumPy's that met a value of a program, as ours; None for any other error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    paths = [frame.f_code.co_filename for frame, _ in frames]
    # `@` and `+` of NumPy leave no frame of theirs.
    ours = [at for at, path in enumerate(paths) if not path.startswith(_FOREIGN) and not is_internal(path)]
    words = ("not a valid JAX type", "as a JAX value", "'Symbol'", "'Argument'", "Symbol ", "symbols.Symbol", "Symbol,")
    if not ours or not any(word in f"{error} " for word in words):
        return None
    foreign = any(path.startswith(_FOREIGN) for path in paths[ours[-1] + 1 :])
    if not foreign and "ufunc" not in str(error):
        return None
    path, number = paths[ours[-1]], frames[ours[-1]][1]
    called = [frame.f_code.co_name for frame, _ in frames[ours[-1] + 1 :]]
    names = re.findall(r"<function (\w+)|(\w+) requires|function (\w+)", str(error))
    names = [name for found in names for name in found if name] + called
    line = linecache.getline(path, number)
    names += re.findall(r"\.(\w+)\(", line)
    name = next((name for name in names if _ours(name) is not None), "")
    return fail(instead_of(name), f"{path}:{number}")
