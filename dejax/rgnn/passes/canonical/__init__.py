"""Ways of writing one function become one form, before the passes that choose between forms.

A shipped layer is written in these forms; users write the others. Each line is a rule or a small pass in the file that
it names.

    written                                          becomes                              in
    x[:, 0] of a last axis of size 1                 the same without the axis            unit_axes
    an expression twice                              the value of the first               cse
    (a * b).sum(-1), a softmax in parts, x ** 2      dot(a, b), edge_softmax, square(x)   plain_forms
    heads in a Python loop                           all heads at once, with an axis      stack_heads
    (x @ w)[:d], (x @ w)[d:]                         x @ w[:, :d], x @ w[:, d:]           slice_weights
    [x_j, x_i] @ W                                   x_j @ W_1 + x_i @ W_2                split_products
    work on [a, b], rows side by side                the same for a and for b             split_rows
    (x @ W).reshape(heads, d)                        x @ W', a weight with heads          weight_heads
    (c_e * x_j) @ W, c one number                    c_e * (x_j @ W)                      scale_products
    x_j @ W_r + x_j @ U, x_j @ W + y_j @ W           x_j @ (W_r + U), (x_j + y_j) @ W     combine_products

Two wait for `aggregate`, which may do better: `scale_products` of shared weights, and `split_sums`, by which
(x_j + x_i) @ W becomes x_j @ W + x_i @ W. Two bring what `backward` writes to the forms that a program would have:
`combine_node_products` adds rows of nodes before their product, and `concat_parts` puts the gradients of parts side by
side.
"""

from __future__ import annotations

from collections.abc import Callable

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import OpProgram
from dejax.rgnn.passes.canonical.combine_products import combine_products
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.canonical.plain_forms import plain_forms
from dejax.rgnn.passes.canonical.scale_products import scale_products
from dejax.rgnn.passes.canonical.slice_weights import slice_weights
from dejax.rgnn.passes.canonical.split_products import split_products
from dejax.rgnn.passes.canonical.split_rows import split_rows
from dejax.rgnn.passes.canonical.stack_heads import stack_heads
from dejax.rgnn.passes.canonical.unit_axes import drop_unit_axes
from dejax.rgnn.passes.canonical.weight_heads import weight_heads
from dejax.rgnn.passes.dce import dce

__all__ = ["CANONICAL"]

# Some look for values that one operator alone reads, so what is no longer needed goes first (`dce`).
CANONICAL: tuple[tuple[str, Callable[[OpProgram, Counts], OpProgram]], ...] = (
    ("unit_axes", drop_unit_axes),
    ("cse", cse),
    ("plain_forms", plain_forms),
    ("dce", dce),
    ("stack_heads", stack_heads),
    ("dce", dce),
    ("plain_forms", plain_forms),
    ("dce", dce),
    ("slice_weights", slice_weights),
    ("cse", cse),
    ("dce", dce),
    ("split_products", split_products),
    ("split_rows", split_rows),
    ("dce", dce),
    ("weight_heads", weight_heads),
    ("scale_products", scale_products),
    ("combine_products", combine_products),
    ("dce", dce),
)
