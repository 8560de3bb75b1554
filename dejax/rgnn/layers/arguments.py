"""Checks and small steps that the layers' programs share."""

from __future__ import annotations

from typing import Any

from dejax.rgnn.compiler import functional as F
from dejax.rgnn.compiler.frontend import GraphSymbol, ProgramError, Symbol

Params = dict[str, Any]


def check_params(params: Params, function: str, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Raises ProgramError for a parameter that is missing or unknown."""
    missing = [name for name in required if params.get(name) is None]
    unknown = sorted(set(params) - set(required) - set(optional))
    if missing or unknown:
        problem = f"lack {', '.join(missing)}" if missing else f"hold unknown {', '.join(unknown)}"
        raise ProgramError(
            f"{function}: the parameters {problem}; needed are {', '.join(required)}, optional {', '.join(optional)}"
        )


def check_choice(function: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ProgramError for a keyword that is none of the choices."""
    if value not in choices:
        raise ProgramError(f"{function}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_edge_features(function: str, edge_features: Any, params: Params, names: tuple[str, ...]) -> None:
    """Raises ProgramError where edge features come without their parameters, or parameters without edge features."""
    given = [name for name in names if params.get(name) is not None]
    if edge_features is None and given:
        raise ProgramError(f"{function}: edge_features must be given with the parameters {', '.join(given)}, got None")
    if edge_features is not None and len(given) < len(names):
        lacking = [name for name in names if name not in given]
        raise ProgramError(
            f"{function}: the parameters {', '.join(lacking)} must be given with edge_features, got none"
        )


def ends(g: GraphSymbol, x: Any) -> tuple[Symbol, Symbol]:
    """Node values for sources and for destinations, of an array or of a pair of arrays."""
    if isinstance(x, tuple | list):
        if len(x) != 2:
            raise ProgramError(f"x must be an array or a pair (sources, destinations), got {len(x)} arrays")
        return g.node(x[0]), g.node(x[1])
    both = g.node(x)
    return both, both


def add_bias(g: GraphSymbol, y: Symbol, bias: Any) -> Symbol:
    """y plus a shared bias; y where there is none."""
    return y if bias is None else y + g.shared(bias)


def finish(g: GraphSymbol, y: Symbol, x: Symbol, params: Params, own: str = "residual") -> Symbol:
    """y plus each node's own features times the parameter `own`, and plus `bias`, where the layer has them."""
    if params.get(own) is not None:
        y = y + x @ g.shared(params[own])
    return add_bias(g, y, params.get("bias"))


def attend(g: GraphSymbol, score: Symbol, value: Symbol, scale: Any = None, within: str = "dst") -> Symbol:
    """Sums of edge values [H, d], weighted by the softmax of scores [H]; `scale`, a factor of each edge and head."""
    attention = F.edge_softmax(score, within=within)
    if scale is not None:
        attention = attention * g.edge(scale)
    return g.sum_to_dst(attention[:, None] * value)


def merge_heads(y: Symbol, concat_heads: bool) -> Symbol:
    """[H, d] as [H * d], or the mean of the heads, [d]; a row without heads as it is."""
    if len(y.shape) == 1:
        return y
    return y.reshape(y.shape[0] * y.shape[1]) if concat_heads else y.mean(axis=0)


def incoming(g: GraphSymbol, like: Symbol) -> Symbol:
    """For each node the number of incoming edges; float64 where `like` is, else float32, which holds large counts."""
    count, dtype = g.sum_to_dst(1.0), "float64" if like.dtype == "float64" else "float32"
    return count if count.dtype == dtype else count.astype(dtype)


_NARROW = ("float16", "bfloat16")


def wide(x: Symbol) -> Symbol:
    """A 16-bit value as float32, for squares and their sums: float16 ends at 65,504, and bfloat16 has 8 bits."""
    return x.astype("float32") if x.dtype in _NARROW else x


def narrow_like(x: Symbol, like: Symbol) -> Symbol:
    """A value computed from `wide(like)`, converted to the dtype of `like` where that has 16 bits."""
    return x.astype(like.dtype) if like.dtype in _NARROW else x


def unit_rows(y: Symbol) -> Symbol:
    """Rows divided by their Euclidean norm; rows of zeros stay zero, without gradient."""
    rows = wide(y)
    square = (rows * rows).sum(keepdims=True)
    return narrow_like(rows * F.where(square > 0, F.rsqrt(F.where(square > 0, square, 1.0)), 0.0), y)
