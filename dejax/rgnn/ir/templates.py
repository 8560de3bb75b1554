"""What the kernel templates take: contractions, operators, dtypes, widths and accesses. Fusion asks here first."""

from __future__ import annotations

from dejax.pallas._shapes import padded_size
from dejax.pallas.traversal.arrays import MAX_WIDTH
from dejax.rgnn.ir.inter import COMPOSED_VIAS, Op
from dejax.rgnn.ir.operators import named
from dejax.rgnn.ir.products import Product, with_axes

# Contractions of a row with a matrix for its type, and of two rows into one: the GEMM template.
MATRIX_SPECS = frozenset("k,kn->n hk,hkn->hn k,hkn->hn hk,kn->hn n,kn->k hn,hkn->hk hn,hkn->k hn,kn->hk".split())
# The template also takes a matrix of one column.
GEMM_SPECS = MATRIX_SPECS | {"k,k->"}
WEIGHT_GRADIENT_SPECS = frozenset(
    "k,n->kn hk,hn->hkn k,hn->hkn hk,hn->kn n,k->kn hn,hk->hkn hn,k->hkn hn,hk->kn k,->k hk,h->hk k,h->hk".split()
)
# Contractions of a row with one or a few vectors for its type: the traversal template, in registers.
VECTOR_SPECS = frozenset("k,k-> hk,hk->h k,hk->h ,k->k h,hk->k h,hk->hk".split())
# Row-by-row operators that a kernel can compute on a tile in registers.
TILE_OPS = named(lambda o: o.in_registers)
# What kernels read and write. They compute in float32.
KERNEL_DTYPES = ("float32", "bfloat16", "float16")
# Accesses by which a traversal reads once for all entries of a segment.
ONCE_A_SEGMENT = ("row", "row_indexed", "shared")


def by_head(spec: str) -> bool:
    """Whether an outer product is one for each head of both sides."""
    product = Product.parse(spec)
    return "h" in product.left and "h" in product.right


def refusal(op: Op) -> str | None:
    """Why no traversal can read, compute or write rows of a value; None where one can.

    The traversal template checks the same. Fusion asks first, so that only refused values are left to XLA.
    """
    if op.dtype not in KERNEL_DTYPES:
        return f"{op.dtype} values"
    if len(op.shape) > 2:
        return f"rows of {len(op.shape)} feature axes"
    if 0 in op.shape:
        return "rows without elements"
    if padded_size(op.shape) > MAX_WIDTH:
        return f"rows of {op.width:,} elements, more than {MAX_WIDTH:,}"
    return None


def can_weigh(score: tuple[int, ...], inserts: tuple[tuple[int, ...], ...], value: tuple[int, ...]) -> bool:
    """Whether a weighted sum of rows of a feature shape can have a score of another: a scalar, or one for each head.

    The template takes scores whose shape begins that of the value; `inserts` are the axes of size 1 that align the two.
    """
    kept = ((), score, (*score, *(1,) * (len(value) - len(score))))
    return score == value[: len(score)] and with_axes(score, inserts) in kept


def access_by(via: str, over: str | None) -> tuple[str, str]:
    """How a traversal of the segments of the map `over` reads by the map `via`: the access and its map."""
    if via == "all":
        return "shared", via
    if via == over:
        return "row", via
    for (outer, inner), composed in COMPOSED_VIAS.items():
        if (outer, composed) == (over, via):  # all entries of a segment read the same row
            return "row_indexed", inner
    return "gathered", via
