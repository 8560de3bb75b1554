"""Two grouped GEMMs in a row become one: the rest of linear operator reordering (Hector, section 3.2.3).

    (x_j W_t(j) + b_t(j)) V_r   =   x_j (W_t(r) V_r) + b_t(r) V_r

where all edges of type r come from nodes of one type t(r), as the keys and messages of a heterogeneous graph
transformer do on a graph with typed relations. The products of weights are made once for each edge type, and the
product for each node is not made at all. Products of float16 weights are float32, as in `reorder`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.ir.inter import Builder, Op, Program
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Counts, Rewrite, as_dtype, widened


@dataclass(frozen=True, slots=True)
class _NodeProduct:
    """A product for each node, `x @ w`, whose rows are multiplied again; `bias` (by node type) where one is added."""

    linear: Op
    bias: int | None


def fold(program: Program, counts: Counts) -> Program:
    return _Folding(program, counts).run() if counts.typed_sources else program


class _Folding(Rewrite):
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        first = self.node_product_before(op)
        if first is None:
            return None
        weights, rows = _product(first.linear).weights_first(_product(op))
        x, w = (self.new[a] for a in first.linear.args)
        second = widened(builder, args[1])
        by_edge_type = builder.op("gather", w, via="source_type")
        product = builder.op("linear", by_edge_type, second, spec=str(weights), via="self")
        bias = None
        if first.bias is not None:  # made before the product, whose kernel can add it then
            bias = builder.op("gather", self.new[first.bias], via="source_type")
            bias = builder.op("linear", bias, second, spec=op.attr("spec"), via="self")
        made = builder.op("linear", builder.op("gather", x, via="src"), product, spec=str(rows), via="etype")
        made = made if bias is None else builder.op("add", made, builder.op("gather", bias, via="etype"))
        return as_dtype(builder, made, op.dtype)

    def node_product_before(self, op: Op) -> _NodeProduct | None:
        """The product for each node whose rows a grouped GEMM on edges reads, where one product is less work."""
        if op.name != "linear" or op.attr("via") != "etype":
            return None
        read = self.program.ops[op.args[0]]
        if read.name != "gather" or read.attr("via") != "src":
            return None
        first = self.node_product(read.args[0])
        if first is None or not _folds(_product(first.linear), _product(op)) or not self.only_read_so(read.args[0]):
            return None
        return first if self.is_cheaper(first.linear, op) else None

    def node_product(self, value: int) -> _NodeProduct | None:
        op = self.program.ops[value]
        if op.name == "linear" and op.attr("via") == "ntype":
            return _NodeProduct(op, None)
        if op.name != "add":
            return None
        for product, bias in (op.args, op.args[::-1]):
            linear, read = self.program.ops[product], self.program.ops[bias]
            typed = all(o.attr("via") == "ntype" and o.shape == op.shape for o in (linear, read))
            if typed and linear.name == "linear" and read.name == "gather" and self.users[product] == [value]:
                return None if product in self.program.outputs else _NodeProduct(linear, read.args[0])
        return None

    def only_read_so(self, value: int) -> bool:
        """Whether only grouped GEMMs on edges read a value, at their sources, so that it need not be made."""
        ops, outputs = self.program.ops, self.program.outputs
        if value in outputs:
            return False
        for u in self.users[value]:
            if ops[u].name != "gather" or ops[u].attr("via") != "src" or u in outputs:
                return False
            readers = (ops[v] for v in self.users[u])
            if not all(r.name == "linear" and r.attr("via") == "etype" and r.args[0] == u for r in readers):
                return False
        return True

    def is_cheaper(self, first: Op, op: Op) -> bool:
        """By bytes: rows of x instead of rows of the node product for each pair, against making that product."""
        ops, counts = self.program.ops, self.counts
        x = ops[first.args[0]]
        rows = min(counts.edges, counts.source_pairs)
        weights = counts.edge_types * (ops[first.args[1]].row_bytes + 2 * ops[op.args[1]].row_bytes)
        return rows * (x.row_bytes - first.row_bytes) + weights < counts.nodes * (x.row_bytes + first.row_bytes)


def _folds(first: Product, second: Product) -> bool:
    """Whether both weights are matrices, for each head or not, and rows without heads meet them."""
    matrices = first.is_forward and second.is_forward and first.left == "k"
    return matrices and ("h" in first.right) == ("h" in second.right)


def _product(op: Op) -> Product:
    return Product.parse(op.attr("spec"))
