"""Linear operator reordering (Hector, section 3.2.3): weights meet weights before they meet rows.

`(x W_r) . a_r` becomes `x . (W_r a_r)`, and `(x W_r) V_r` becomes `x (W_r V_r)` where that is less work: the product of
two weights is made once for each type, the product with a row once for each row. `((x W_r) . y) c_r` becomes
`(x (c_r W_r)) . y`, so that no edge reads a scalar of its type. Products of float16 weights are float32: they may be
beyond float16's range where the products with rows are not.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import RATES, Work
from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import as_dtype, scale_of_weight, widened
from dejax.rgnn.passes.rules import Attr, Match, Pat, Rule, Var, rules

_PLAIN = Product.parse("k,kn->n")
_INNER, _INNER_BY_HEAD = Product.parse("k,k->"), Product.parse("hk,hk->h")

_OF_TYPE = Pat("gather", Var("of_type"), via=Attr("via"))
_PRODUCT = Pat("linear", Var("x"), Var("w"), via=Attr("via"), name="product")
_PRODUCT_ONCE = Pat("linear", Var("x"), Var("w"), via=Attr("via"), name="product", once=True)
_PLAIN_PRODUCT = Pat("linear", Var("x"), Var("w"), via=Attr("via"), spec=str(_PLAIN), name="product", once=True)


def _is_typed(m: Match) -> bool:
    """Whether the map of the match has the type of each row."""
    return bool(m["via"] == TYPE_VIA.get(m.op.space))


def _takes_scale(m: Match) -> bool:
    """Whether a scalar by type (and head) can be multiplied into the weight, which must also move fewer bytes."""
    w, scale, counts = m.at("w"), m.at("of_type"), m.counts
    product = Product.parse(m.at("product").attr("spec"))
    if not product.is_forward or ("h" in product.out and "h" not in product.right):
        return False
    fits = _is_typed(m) and w.dtype == scale.dtype and scale.shape in ((), w.shape[:-2])
    # The weight is read, written, and read again. A scalar by type costs an edge a burst of memory, because types need
    # not be in the order of the traversal.
    once = Work().move(3 * counts.rows(w.space), w.row_bytes)
    return fits and once.seconds() < Work().move(counts.rows(m.op.space), RATES.burst_bytes).seconds()


def _scale_in_weight(b: Builder, m: Match) -> int:
    w, factor, shape = widened(b, m.new("w")), scale_of_weight(b, m.new("of_type")), m.shape("of_type")
    if shape:
        factor = b.op("reshape", factor, shape=(*shape, 1, 1))
    product = b.op("linear", m.new("x"), b.op("mul", w, factor), **dict(m.at("product").attrs))
    return as_dtype(b, b.op("dot", product, m.new("y")), m.op.dtype)


def _is_inner_product_with_weight(m: Match) -> bool:
    """Whether only inner products with vectors of the type read the product."""
    ops, product = m.values.ops, m["product"]
    if not _is_typed(m) or product in m.values.outputs or not Product.parse(m.at("product").attr("spec")).is_forward:
        return False
    return all(_is_dot_with_type(ops, ops[u]) for u in m.values.users[product])


def _is_dot_with_type(ops: tuple[Op, ...], op: Op) -> bool:
    read = (ops[a] for a in op.args if ops[a].name == "gather")
    return op.name == "dot" and any(a.attr("via") == TYPE_VIA.get(a.space) for a in read)


def _inner_product_with_weight(b: Builder, m: Match) -> int:
    product, via = m.at("product"), m["via"]
    inner = _INNER if len(product.shape) == 1 else _INNER_BY_HEAD
    weights, rows = Product.parse(product.attr("spec")).weights_first(inner)
    w = b.op("linear", m.new("of_type"), widened(b, m.new("w")), spec=str(weights.swapped), via="self")
    return as_dtype(b, b.op("linear", m.new("x"), w, spec=str(rows), via=via), m.op.dtype)


def _product_with_vector(b: Builder, m: Match) -> int:
    inner = _INNER if len(m.shape("x")) == 1 else _INNER_BY_HEAD
    return b.op("linear", m.new("x"), m.new("of_type"), spec=str(inner), via=m["via"])


def _is_fewer_multiplications(m: Match) -> bool:
    if m["via"] == "self":
        return False
    (k,), (n,), (out,) = m.shape("x"), m.shape("product"), m.op.shape
    rows, types = m.counts.rows(m.op.space), m.counts.rows(m.at("v").space)
    apart, together = Work().multiply(rows, k * n + n * out), Work().multiply(rows, k * out)
    return apart.seconds() > together.multiply(types, k * n * out).seconds()


def _one_product(b: Builder, m: Match) -> int:
    weights, rows = _PLAIN.weights_first(_PLAIN)
    w = b.op("linear", m.new("w"), widened(b, m.new("v")), spec=str(weights), via="self")
    return as_dtype(b, b.op("linear", m.new("x"), w, spec=str(rows), via=m["via"]), m.op.dtype)


reorder = rules(
    Rule(Pat("mul", Pat("dot", _PRODUCT_ONCE, Var("y"), once=True), _OF_TYPE), _scale_in_weight, where=_takes_scale),
    Rule(Pat("dot", _OF_TYPE, _PRODUCT), _inner_product_with_weight, where=_is_inner_product_with_weight),
    Rule(Pat("dot", _OF_TYPE, Var("x")), _product_with_vector, where=lambda m: _is_typed(m) and len(m.shape("x")) <= 2),
    Rule(
        Pat("linear", _PLAIN_PRODUCT, Var("v"), via=Attr("via"), spec=str(_PLAIN)),
        _one_product,
        where=_is_fewer_multiplications,
    ),
)
