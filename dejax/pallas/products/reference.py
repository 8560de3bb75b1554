"""The plain references of this folder's templates: numpy in float64, one type after the other.

The contract tests (`tests/pallas/test_contract.py`, `test_row_products.py`, `test_sums.py`) hold the kernels to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dejax.pallas.formats.row_scaled import RowScaled
from dejax.pallas.products.requests import GroupedGemm, GroupedWeightGradient


def grouped_gemm(r: GroupedGemm) -> tuple[np.ndarray, np.ndarray | None]:
    """The result rows, and the inner products with `dot_vector` if it is given."""
    offsets, e = np.asarray(r.groups.offsets), r.epilogue
    flat = r.x.ndim == 2
    x, w = _with_heads(_wide(r.x), 3), _with_heads(_wide(r.w), 4)
    w = w.swapaxes(2, 3) if r.transpose_w else w
    type_, row, out = _types(offsets), _rows(r.x_index, offsets), _rows(r.output.index, offsets)
    y = np.zeros((offsets[-1], *w.shape[1::2]))
    for t in range(len(offsets) - 1):
        y[type_ == t] = np.einsum("phk,hkn->phn", x[row[type_ == t]], w[t])
    if e.bias is not None:
        y = y + _with_heads(_wide(e.bias), 3)[type_]
    y = activated(e.activation, y)
    result = np.zeros((r.out_rows, *y.shape[1:]))
    result[out] = y
    if e.dot_vector is None:
        return (result[:, 0] if flat else result), None
    parts = (y * _with_heads(_wide(e.dot_vector), 3)[type_]).reshape(len(y), y.shape[1] * e.dot_parts, -1).sum(-1)
    dot = np.zeros((r.out_rows, parts.shape[1]))
    dot[out] = parts
    return (result[:, 0] if flat else result), (dot[:, 0] if flat and e.dot_parts == 1 else dot)


def activated(name: str | None, y: np.ndarray) -> np.ndarray:
    """The activation of an epilogue."""
    kind, _, slope = (name or "").partition(":")
    return {
        "": lambda: y,
        "relu": lambda: np.maximum(y, 0),
        "tanh": lambda: np.tanh(y),
        "sigmoid": lambda: 1 / (1 + np.exp(-y)),
        "leaky_relu": lambda: np.where(y > 0, y, float(slope or 0.01) * y),
    }[kind]()


def grouped_weight_gradient(r: GroupedWeightGradient) -> np.ndarray:
    """The sum of `x^T y` for each type."""
    offsets, flat = np.asarray(r.offsets), r.x.ndim == 2
    x, y = _with_heads(_wide(r.x), 3), _with_heads(_wide(r.y), 3)
    type_, x_row, y_row = _types(offsets), _rows(r.x_index, offsets), _rows(r.y_index, offsets)
    left, right = x[x_row], y[y_row]
    total = np.zeros((len(offsets) - 1, *x.shape[1:], y.shape[2]))
    for t in range(len(offsets) - 1):
        total[t] = np.einsum("phk,phn->hkn", left[type_ == t], right[type_ == t])
    return total[:, 0] if flat else total


def row_product(x: Any, y: Any, mask: Any = None) -> np.ndarray:
    """The sum of `x[r]^T y[r]` over the rows of the mask."""
    x, y = _wide(x), _wide(y)
    return x.T @ y if mask is None else x[np.asarray(mask)].T @ y[np.asarray(mask)]


def sum_rows(x: Any, offsets: Any, order: Any = None) -> np.ndarray:
    """The sums of rows `order[offsets[r]:offsets[r + 1]]`."""
    rows, offsets = _wide(x), np.asarray(offsets)
    total = np.zeros((len(offsets) - 1, *rows.shape[1:]))
    np.add.at(total, _types(offsets), rows if order is None else rows[np.asarray(order)])
    return total


def _wide(a: Any) -> np.ndarray:
    return np.asarray(a.decode() if isinstance(a, RowScaled) else a).astype(np.float64)


def _with_heads(a: np.ndarray, ndim: int) -> np.ndarray:
    """The array with an axis of one head where it has none."""
    return a if a.ndim == ndim else a[:, None]


def _types(offsets: np.ndarray) -> np.ndarray:
    """The type of each position."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _rows(index: Any, offsets: np.ndarray) -> np.ndarray:
    """The row of each position that has a type."""
    return np.arange(offsets[-1]) if index is None else np.asarray(index)[: offsets[-1]]
