"""Two grouped GEMMs in a row become one: the rest of linear operator reordering (Hector, section 3.2.3).

    (x_j W_t(j) + b_t(j)) V_r   =   x_j (W_t(r) V_r) + b_t(r) V_r

where all edges of type r come from nodes of one type t(r), as the keys and messages of a heterogeneous graph
transformer do on a graph with typed relations. The products of weights are made once for each edge type, and the
product for each node is not made at all. Products of float16 weights are float32, as in `reorder`.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts, Work
from dejax.rgnn.ir.inter import Builder, OpProgram
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import as_dtype, widened
from dejax.rgnn.passes.rules import Match, Pat, Rule, Var, rules


def _read_at_sources(rows: Pat) -> Pat:
    """A grouped GEMM of rows of nodes, read at the source of each edge."""
    return Pat("linear", Pat("gather", rows, via="src"), Var("second_weight"), via="etype")


_PRODUCT = Pat("linear", Var("x"), Var("w"), via="ntype", name="product")
_ADDED = Pat("linear", Var("x"), Var("w"), via="ntype", name="product", once=True)
_BIASED = Pat("add", _ADDED, Pat("gather", Var("bias"), via="ntype", name="read"), name="rows")


def _is_one_product(m: Match) -> bool:
    """Whether both weights are matrices (for each head or not), and one product with both is possible and better."""
    first, second = (Product.parse(op.attr("spec")) for op in (m.at("product"), m.op))
    matrices = first.is_forward and second.is_forward and first.left == "k"
    if not matrices or ("h" in first.right) != ("h" in second.right):
        return False
    if "bias" in m and {m.shape("product"), m.shape("read")} != {m.shape("rows")}:
        return False
    return _is_read_by_products_alone(m, m["rows" if "bias" in m else "product"]) and _is_cheaper(m)


def _is_read_by_products_alone(m: Match, rows: int) -> bool:
    """Whether only grouped GEMMs on edges read the rows of nodes, at the sources; then the rows are not needed."""
    ops, users, outputs = m.values.ops, m.values.users, m.values.outputs
    for u in users[rows]:
        if ops[u].name != "gather" or ops[u].attr("via") != "src" or u in outputs:
            return False
        if not all(ops[v].name == "linear" and ops[v].attr("via") == "etype" and ops[v].args[0] == u for v in users[u]):
            return False
    return rows not in outputs


def _is_cheaper(m: Match) -> bool:
    """Whether multiplying x for each pair by a product of weights is cheaper than reading a product of each node."""
    x, product, counts = m.at("x"), m.at("product"), m.counts
    rows = min(counts.edges, counts.source_pairs)
    weights = m.at("w").row_bytes + 2 * m.at("second_weight").row_bytes
    together = Work().move(rows, x.row_bytes).move(counts.edge_types, weights)
    apart = Work().move(rows, product.row_bytes).move(counts.nodes, x.row_bytes + product.row_bytes)
    return together.seconds() < apart.seconds()


def _one_product(b: Builder, m: Match) -> int:
    spec = m.op.attr("spec")
    weights, rows = Product.parse(m.at("product").attr("spec")).weights_first(Product.parse(spec))
    second = widened(b, m.new("second_weight"))
    by_edge_type = b.op("gather", m.new("w"), via="source_type")
    product = b.op("linear", by_edge_type, second, spec=str(weights), via="self")
    bias = None
    if "bias" in m:  # made before the product, whose kernel can add it then
        bias = b.op("gather", m.new("bias"), via="source_type")
        bias = b.op("linear", bias, second, spec=spec, via="self")
    made = b.op("linear", b.op("gather", m.new("x"), via="src"), product, spec=str(rows), via="etype")
    made = made if bias is None else b.op("add", made, b.op("gather", bias, via="etype"))
    return as_dtype(b, made, m.op.dtype)


_fold = rules(*(Rule(_read_at_sources(rows), _one_product, where=_is_one_product) for rows in (_BIASED, _PRODUCT)))


def fold(program: OpProgram, counts: Counts) -> OpProgram:
    return _fold(program, counts) if counts.typed_sources else program
