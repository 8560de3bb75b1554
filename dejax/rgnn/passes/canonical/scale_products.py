"""Products move out of scales, to the rows that they are made of.

    (c_e * x_j) @ W                  becomes    c_e * (x_j @ W),  c one number for each edge
    (c_r * x_j) @ W_r                becomes    x_j @ (c_r W_r),  c one number for each edge type

`compact` then multiplies once for each node, pair or type. Products of float16 rows without their scale may be beyond
its range, and are float32.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, OpProgram, Space, is_float
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import as_dtype, is_anchor, origins, scale_of_weight, widened
from dejax.rgnn.passes.rules import Either, Match, Pat, Rule, Var, rules


def _scaled(scale: Pat) -> Pat:
    """A row multiplied or divided by a scale, if only the product reads the result."""
    row = Var("row")
    return Either(Pat("mul", scale, row, name="scaled", once=True), Pat("div", row, scale, name="scaled", once=True))


def _is_product_of_scaled_row(m: Match) -> bool:
    row, scale, scaled = m.at("row"), m.at("scale"), m.at("scaled")
    product = m.op.space == Space.EDGE and is_float(m.op.dtype) and Product.parse(m.op.attr("spec")).is_forward
    one_number = row.shape == scaled.shape and scale.shape in ((), (1,))
    return product and one_number and {scale.dtype, row.dtype} == {m.op.dtype}


def _scale_in_weight(b: Builder, m: Match) -> int:
    w, factor = widened(b, m.new("w")), m.new("factor")
    if m.shape("scale"):
        factor = b.op("reshape", factor, shape=())
    w = b.op(m.at("scaled").name, w, scale_of_weight(b, factor))
    return as_dtype(b, b.op("linear", m.new("row"), w, **dict(m.op.attrs)), m.op.dtype)


def _is_scale_finer_than_row(m: Match) -> bool:
    """Whether `compact` multiplies the row once for each node, type or pair, while the scale differs between edges."""
    if not _is_product_of_scaled_row(m):
        return False
    types = {"etype"} if m.op.attr("via") == "etype" else set()
    of_row = origins(m.values.program, m["row"]) | types
    return bool(origins(m.values.program, m["scale"]) - of_row) and "edge" not in of_row and is_anchor(of_row)


def _scale_after_product(b: Builder, m: Match) -> int:
    product = b.op("linear", m.new("row"), widened(b, m.new("w")), **dict(m.op.attrs))
    scale, shape = m.new("scale"), (1,) * len(m.op.shape)
    if m.shape("scale") not in ((), shape):
        scale = b.op("reshape", scale, shape=shape)
    return as_dtype(b, b.op(m.at("scaled").name, product, scale), m.op.dtype)


_OF_TYPE = Pat("gather", Var("factor"), via="etype", name="scale")
_WEIGHT = Var("w")
_of_typed_weights = rules(
    Rule(Pat("linear", _scaled(_OF_TYPE), _WEIGHT, via="etype"), _scale_in_weight, where=_is_product_of_scaled_row),
    Rule(
        Pat("linear", _scaled(Var("scale")), _WEIGHT, via="etype"), _scale_after_product, where=_is_scale_finer_than_row
    ),
)
_of_shared_weights = rules(
    Rule(Pat("linear", _scaled(Var("scale")), _WEIGHT, via="all"), _scale_after_product, where=_is_scale_finer_than_row)
)


def scale_products(program: OpProgram, counts: Counts, *, shared: bool = False) -> OpProgram:
    """Applies the rules for weights by type or, with `shared`, those for shared weights.

    The rules for shared weights run after `aggregate`, which may find a better form.
    """
    return (_of_shared_weights if shared else _of_typed_weights)(program, counts)
