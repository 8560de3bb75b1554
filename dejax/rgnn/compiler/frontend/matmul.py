"""Products of rows with weights: `x @ w`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dejax.rgnn.compiler.frontend.errors import SPACE_WORDS, fail
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space

if TYPE_CHECKING:
    from dejax.rgnn.compiler.frontend.symbols import Symbol

_SPECS = {(1, 2): "k,kn->n", (2, 3): "hk,hkn->hn", (1, 3): "k,hkn->hn", (2, 2): "hk,kn->hn"}


def matmul(x: Symbol, weight: Any) -> Symbol:
    """`x @ weight`: each row times the matrix of its type, or times a vector."""
    w = x.trace.weight(weight)
    if not x.shape or not w.shape:
        raise fail(f"x and w in x @ w must have a feature axis, got {x.shape} and {w.shape}; use x * w")
    if len(w.shape) == 1:
        return _with_vector(x, w)
    via = _via(x, w)
    rank = (len(x.shape), len(w.shape))
    spec = "jk,kn->jn" if via == "self" and rank == (2, 2) else _SPECS.get(rank)
    if spec is None:
        raise fail(
            f"x @ w takes rows of shape (width,) or (heads, width) and a weight of shape (width,), (width, out) or "
            f"(heads, width, out) for each type; got {x.shape} and {w.shape}"
        )
    _check_width(x, w.shape[-2])
    return x.trace.emit("linear", x, w, spec=spec, via=via)


def _check_width(x: Symbol, width: int) -> None:
    if x.shape[-1] != width:
        raise fail(f"rows of {SPACE_WORDS[x.space]} must be {width} wide, as the weight is, got {x.shape[-1]}")


def _with_vector(x: Symbol, w: Symbol) -> Symbol:
    """Inner products of rows with a vector; their spaces are combined as in `x * w`."""
    _check_width(x, w.shape[0])
    if len(x.shape) == 1:
        return x.trace.emit("dot", *x.trace.align(x, w))
    wide = w.reshape(*(1,) * (len(x.shape) - 1), w.shape[0])
    return (x * wide).sum(-1)


def _via(x: Symbol, w: Symbol) -> str:
    """The map by which rows of x find their matrix."""
    if w.space == x.space and w.space in inter.TYPE_SPACES:
        return "self"
    if w.space == Space.GRAPH:
        return "all"
    via = inter.TYPE_VIA.get(x.space, "")
    if via and inter.VIAS[via].coarse == w.space:
        return via
    hint = ""
    if w.space == Space.NODE_TYPE:
        hint = "; multiply on the nodes first, g.node(h) @ g.per_node_type(w), then g.src(...) or g.dst(...)"
    elif w.space == Space.EDGE_TYPE and x.space == Space.NODE:
        hint = "; read the node value on the edges first, g.src(h) @ g.per_edge_type(w)"
    raise fail(f"{SPACE_WORDS[x.space]} cannot be multiplied by {SPACE_WORDS[w.space]}{hint}")
