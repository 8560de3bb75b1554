"""The graph inside a program: spaces of arrays, reads on the edges, reductions."""

from __future__ import annotations

from typing import Any

from dejax.rgnn.compiler.frontend.errors import SPACE_WORDS, fail
from dejax.rgnn.compiler.frontend.symbols import Symbol
from dejax.rgnn.compiler.frontend.trace import Trace
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space


class GraphSymbol:
    """The graph inside a program: gives arrays a space, reads values on the edges, and reduces them.

    Arguments are arrays [rows, *F] of the program's call, where F is the feature shape, or values (`Symbol`) of the
    program. Reductions work on each feature by itself and keep the feature shape.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    # what arguments stand for
    def node(self, x: Any) -> Symbol:
        """Declares an array [nodes, *F] as a value with one row for each node."""
        return self._trace.declare(x, Space.NODE, "g.node")

    def edge(self, x: Any) -> Symbol:
        """Declares an array [edges, *F] as a value with one row for each edge, in the order of the given edges."""
        return self._trace.declare(x, Space.EDGE, "g.edge")

    def source_pair(self, x: Any) -> Symbol:
        """Declares an array as a value with one row for each distinct pair of a sender and an edge type.

        Pairs are numbered as in `RelGraph.by_source_pair`.
        """
        return self._trace.declare(x, Space.SOURCE_PAIR, "g.source_pair")

    def per_edge_type(self, w: Any) -> Symbol:
        """Declares an array [edge types, *F], a weight or a constant, as a value with one row for each edge type."""
        return self._trace.declare(w, Space.EDGE_TYPE, "g.per_edge_type")

    def per_node_type(self, w: Any) -> Symbol:
        """Declares an array [node types, *F], a weight or a constant, as a value with one row for each node type."""
        return self._trace.declare(w, Space.NODE_TYPE, "g.per_node_type")

    def shared(self, w: Any) -> Symbol:
        """Declares an array [*F], a weight or a constant, as one value that all rows share."""
        return self._trace.declare(w, Space.GRAPH, "g.shared")

    # reading on the edges
    def src(self, x: Any) -> Symbol:
        """Reads a node value (or a value of source pairs) on the edges: each edge gets the row of its source."""
        return self._endpoint(x, "src", "source_pair", "g.src")

    def dst(self, x: Any) -> Symbol:
        """Reads a node value on the edges: each edge gets the row of its destination."""
        return self._endpoint(x, "dst", "destination_pair", "g.dst")

    def _endpoint(self, x: Any, via: str, pair_via: str, method: str) -> Symbol:
        if isinstance(x, Symbol) and x.space == inter.VIAS[pair_via].coarse:
            return self._trace.emit("gather", x, via=pair_via)
        return self._trace.emit("gather", self._trace.declare(x, Space.NODE, method), via=via)

    def in_degree(self, *, within_relation: bool = False, dtype: str | None = None) -> Symbol:
        """On each edge, the number of edges into its destination; with `within_relation`, of its own edge type.

        `dtype` is float32, float64, int32 or int64, since 16-bit dtypes do not hold the counts of large graphs. By
        default counts are weak: they take float32 or float64 from the values that they meet, and alone are float32, or
        float64 where JAX has 64 bits enabled. A 16-bit value divided by a count is float32; `.astype` makes it 16-bit
        again.
        """
        via = "destination_pair" if within_relation else "dst"
        return self._trace.emit("gather", self._trace.count(via, dtype), via=via)

    def out_degree(self, *, dtype: str | None = None) -> Symbol:
        """Counts, for each edge, the edges out of its source node. `dtype` is as for `in_degree`."""
        return self._trace.emit("gather", self._trace.count("src", dtype), via="src")

    # reductions over edges
    def _reduce(self, x: Any, via: str, how: str, method: str) -> Symbol:
        trace = self._trace
        if isinstance(x, Symbol) and x.space == Space.EDGE_TYPE:
            x = trace.emit("gather", x, via="etype")
        return self._reduced(trace.declare(x, Space.EDGE, method), via, how)

    def _reduced(self, x: Symbol, via: str, how: str) -> Symbol:
        """The reduction of a value along a map from its space."""
        trace = self._trace
        if how == "sum" and x.op.name == "const" and x.dtype in inter.COUNT_DTYPES and inter.VIAS[via].fine is not None:
            # A sum of ones is a count, which the graph's offsets have: no kernel goes over the edges.
            count = trace.count(via, None if x.index in trace.weak else x.dtype)
            value = x.op.attr("value")
            return count if value == 1.0 else count * value
        if how in ("sum", "prod"):
            return trace.emit("reduce", trace.counted(x), via=via, op=how)
        if how == "min" and via != "all" and inter.is_float(x.dtype):  # kernels have only maxima; empty segments give 0
            return 0.0 - trace.emit("reduce", 0.0 - x, via=via, op="max")
        if how != "mean":
            return trace.emit("reduce", x, via=via, op=how)
        x = trace.floating(x)
        # Sums and counts of many edges overflow 16-bit dtypes; their quotients do not.
        wide = trace.wide(x)
        total = trace.emit("reduce", wide, via=via, op="sum")
        space = {"space": str(x.space)} if inter.VIAS[via].fine is None else {}
        count = trace.count(via, None if wide.index in trace.weak else wide.dtype, **space)
        one = trace.value(1.0, count)
        mean = trace.binary("div", total, trace.binary("max", count, one))
        return mean if mean.dtype == x.dtype else mean.astype(x.dtype)

    def sum_to_dst(self, x: Any) -> Symbol:
        """Sums an edge value over the incoming edges of each node. Gives a node value; 0 for a node without them."""
        return self._reduce(x, "dst", "sum", "g.sum_to_dst")

    def mean_to_dst(self, x: Any) -> Symbol:
        """Averages an edge value over the incoming edges of each node.

        Gives a node value; 0 for a node without such edges.
        """
        return self._reduce(x, "dst", "mean", "g.mean_to_dst")

    def max_to_dst(self, x: Any) -> Symbol:
        """Takes the maximum of an edge value over the incoming edges of each node.

        Gives a node value; 0 for a node with no such edge or only -inf. Equal maxima share the gradient equally.
        """
        return self._reduce(x, "dst", "max", "g.max_to_dst")

    def sum_to_src(self, x: Any) -> Symbol:
        """Sums an edge value over the outgoing edges of each node. Gives a node value; 0 for a node without them."""
        return self._reduce(x, "src", "sum", "g.sum_to_src")

    def mean_to_src(self, x: Any) -> Symbol:
        """Averages an edge value over the outgoing edges of each node.

        Gives a node value; 0 for a node without such edges.
        """
        return self._reduce(x, "src", "mean", "g.mean_to_src")

    def max_to_src(self, x: Any) -> Symbol:
        """Takes the maximum of an edge value over the outgoing edges of each node.

        Gives a node value; 0 for a node with no such edge or only -inf. Equal maxima share the gradient equally.
        """
        return self._reduce(x, "src", "max", "g.max_to_src")

    def min_to_dst(self, x: Any) -> Symbol:
        """Takes the minimum of an edge value over the incoming edges of each node.

        Gives a node value; 0 for a node with no such edge or only inf. Equal minima share the gradient equally.
        """
        return self._reduce(x, "dst", "min", "g.min_to_dst")

    def min_to_src(self, x: Any) -> Symbol:
        """Takes the minimum of an edge value over the outgoing edges of each node.

        Gives a node value; 0 for a node with no such edge or only inf. Equal minima share the gradient equally.
        """
        return self._reduce(x, "src", "min", "g.min_to_src")

    def prod_to_dst(self, x: Any) -> Symbol:
        """Multiplies the rows of an edge value over the incoming edges of each node.

        Gives a node value; 1 for a node without such edges. Gradients are exact at zeros, too.
        """
        return self._reduce(x, "dst", "prod", "g.prod_to_dst")

    def prod_to_src(self, x: Any) -> Symbol:
        """Multiplies the rows of an edge value over the outgoing edges of each node.

        Gives a node value; 1 for a node without such edges. Gradients are exact at zeros, too.
        """
        return self._reduce(x, "src", "prod", "g.prod_to_src")

    # to types, and to the whole graph
    def _reduce_to_node_type(self, x: Any, how: str, method: str) -> Symbol:
        return self._reduced(self._trace.declare(x, Space.NODE, method), "ntype", how)

    def _reduce_to_edge_type(self, x: Any, how: str, method: str) -> Symbol:
        if not (isinstance(x, Symbol) and x.space in (Space.SOURCE_PAIR, Space.DESTINATION_PAIR)):
            x = self._trace.declare(x, Space.EDGE, method)
        return self._reduced(x, inter.TYPE_VIA[x.space], how)

    def _reduce_to_graph(self, x: Any, how: str, method: str) -> Symbol:
        return self._reduced(self._rows(x, method), "all", how)

    def _rows(self, x: Any, method: str) -> Symbol:
        """A value that has rows: of any space but the whole graph."""
        x = self._trace.operand(x) if self._trace.is_operand(x) else x
        if not isinstance(x, Symbol) or x.space == Space.GRAPH:
            found = SPACE_WORDS[Space.GRAPH] if isinstance(x, Symbol) else type(x).__name__
            raise fail(f"{method} needs a value of nodes, edges, pairs or types, got {found}")
        return x

    def sum_to_node_type(self, x: Any) -> Symbol:
        """Sums a node value over the nodes of each node type.

        Gives one row for each node type; 0 for a type without nodes.
        """
        return self._reduce_to_node_type(x, "sum", "g.sum_to_node_type")

    def mean_to_node_type(self, x: Any) -> Symbol:
        """Averages a node value over the nodes of each node type.

        Gives one row for each node type; 0 for a type without nodes.
        """
        return self._reduce_to_node_type(x, "mean", "g.mean_to_node_type")

    def max_to_node_type(self, x: Any) -> Symbol:
        """Takes the maximum of a node value over the nodes of each node type.

        Gives one row for each node type; 0 for a type with no nodes or only -inf.
        """
        return self._reduce_to_node_type(x, "max", "g.max_to_node_type")

    def min_to_node_type(self, x: Any) -> Symbol:
        """Takes the minimum of a node value over the nodes of each node type.

        Gives one row for each node type; 0 for a type with no nodes or only inf.
        """
        return self._reduce_to_node_type(x, "min", "g.min_to_node_type")

    def sum_to_edge_type(self, x: Any) -> Symbol:
        """Sums a value of edges (or pairs) over the edges (or pairs) of each edge type.

        Gives one row for each edge type; 0 for a type without rows.
        """
        return self._reduce_to_edge_type(x, "sum", "g.sum_to_edge_type")

    def mean_to_edge_type(self, x: Any) -> Symbol:
        """Averages a value of edges (or pairs) over the edges (or pairs) of each edge type.

        Gives one row for each edge type; 0 for a type without rows.
        """
        return self._reduce_to_edge_type(x, "mean", "g.mean_to_edge_type")

    def max_to_edge_type(self, x: Any) -> Symbol:
        """Takes the maximum of a value of edges (or pairs) over the edges (or pairs) of each edge type.

        Gives one row for each edge type; 0 for a type with no rows or only -inf.
        """
        return self._reduce_to_edge_type(x, "max", "g.max_to_edge_type")

    def min_to_edge_type(self, x: Any) -> Symbol:
        """Takes the minimum of a value of edges (or pairs) over the edges (or pairs) of each edge type.

        Gives one row for each edge type; 0 for a type with no rows or only inf.
        """
        return self._reduce_to_edge_type(x, "min", "g.min_to_edge_type")

    def sum_to_graph(self, x: Any) -> Symbol:
        """Sums a value over all its rows. Gives one shared value; 0 without rows."""
        return self._reduce_to_graph(x, "sum", "g.sum_to_graph")

    def mean_to_graph(self, x: Any) -> Symbol:
        """Averages a value over all its rows. Gives one shared value; 0 without rows."""
        return self._reduce_to_graph(x, "mean", "g.mean_to_graph")

    def max_to_graph(self, x: Any) -> Symbol:
        """Takes the maximum of a value over all its rows. Gives one shared value; 0 with no row above -inf."""
        return self._reduce_to_graph(x, "max", "g.max_to_graph")

    def min_to_graph(self, x: Any) -> Symbol:
        """Takes the minimum of a value over all its rows. Gives one shared value; 0 with no row below inf."""
        return self._reduce_to_graph(x, "min", "g.min_to_graph")

    # by an integer per row: graphs of a batch
    def _reduce_by(self, x: Any, ids: Any, num: int, how: str) -> Symbol:
        method = f"g.{how}_by"
        x = self._rows(x, method)
        ids = self._ids(ids, x.space, num, method)
        attrs = {"via": "all", "size": num, "outside": "drop"}
        if how != "mean":
            return self._trace.emit("place", self._trace.counted(x) if how == "sum" else x, ids, op=how, **attrs)
        x = self._trace.floating(x)
        wide = self._trace.wide(x)
        one = self._trace.symbol(self._trace.builder.const(1.0, wide.dtype, x.space))
        total, count = (self._trace.emit("place", v, ids, op="sum", **attrs) for v in (wide, one))
        count = self._trace.binary("max", count, 1.0).reshape(num, *(1,) * len(x.shape))
        mean = total / count
        return mean if mean.dtype == x.dtype else mean.astype(x.dtype)

    def _ids(self, ids: Any, space: Space, num: Any, method: str) -> Symbol:
        if not isinstance(num, int) or isinstance(num, bool) or num < 0:
            raise fail(
                f"num, the number of results of {method}(x, ids, num), must be a non-negative Python int, got {num!r}"
            )
        ids = self._trace.declare(ids, space, method)
        if not ids.dtype.startswith(("int", "uint")) or ids.shape:
            raise fail(
                f"ids in {method}(x, ids, num) must be one integer per row, got {ids.dtype} of feature shape "
                f"{ids.shape}"
            )
        return ids

    def sum_by(self, x: Any, ids: Any, num: int) -> Symbol:
        """Sums the rows of a value that have the same integer. Gives one shared value of feature shape (num, *F).

        Args:
          x: a value with rows, for example of nodes.
          ids: one integer per row, for example the graph of a batch that a node belongs to; an argument or a value of
            the same space. Rows whose integer is not in 0, ..., num - 1 are left out.
          num: the number of sums, a Python int.
        """
        return self._reduce_by(x, ids, num, "sum")

    def mean_by(self, x: Any, ids: Any, num: int) -> Symbol:
        """Averages the rows of a value that have the same integer; arguments as of `sum_by`.

        0 for an integer without rows.
        """
        return self._reduce_by(x, ids, num, "mean")

    def max_by(self, x: Any, ids: Any, num: int) -> Symbol:
        """Takes the maximum of the rows of a value that have the same integer; arguments as of `sum_by`.

        0 for an integer with no row above -inf. Equal maxima share the gradient equally.
        """
        return self._reduce_by(x, ids, num, "max")

    def min_by(self, x: Any, ids: Any, num: int) -> Symbol:
        """Takes the minimum of the rows of a value that have the same integer; arguments as of `sum_by`.

        0 for an integer with no row below inf. Equal minima share the gradient equally.
        """
        return self._reduce_by(x, ids, num, "min")
