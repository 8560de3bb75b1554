"""The graph inside a program: spaces of arrays, reads on the edges, reductions."""

from __future__ import annotations

from typing import Any

from dejax.rgnn.compiler.frontend.errors import SPACE_WORDS, fail
from dejax.rgnn.compiler.frontend.symbols import Symbol
from dejax.rgnn.compiler.frontend.trace import Trace
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space


class GraphSymbol:
    """The graph inside a program: gives arrays a space, reads values on the edges, and reduces them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    # what arguments stand for
    def node(self, x: Any) -> Symbol:
        """A value with one row per node."""
        return self._trace.declare(x, Space.NODE, "g.node")

    def edge(self, x: Any) -> Symbol:
        """A value with one row per edge, in the user's order of edges."""
        return self._trace.declare(x, Space.EDGE, "g.edge")

    def source_pair(self, x: Any) -> Symbol:
        """A value with one row per unique (sender, edge type) pair, numbered as in `RelGraph.by_source_pair`."""
        return self._trace.declare(x, Space.SOURCE_PAIR, "g.source_pair")

    def per_edge_type(self, w: Any) -> Symbol:
        """A weight or constant with one row per edge type."""
        return self._trace.declare(w, Space.EDGE_TYPE, "g.per_edge_type")

    def per_node_type(self, w: Any) -> Symbol:
        """A weight or constant with one row per node type."""
        return self._trace.declare(w, Space.NODE_TYPE, "g.per_node_type")

    def shared(self, w: Any) -> Symbol:
        """A weight or constant without rows, shared by all."""
        return self._trace.declare(w, Space.GRAPH, "g.shared")

    # reading on the edges
    def src(self, x: Any) -> Symbol:
        """The value of each edge's source node (or of its source pair)."""
        return self._endpoint(x, "src", "source_pair", "g.src")

    def dst(self, x: Any) -> Symbol:
        """The value of each edge's destination node."""
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
        """On each edge, the number of edges out of its source; `dtype` as for `in_degree`."""
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
        """Each node's sum over its incoming edges; 0 where there is none."""
        return self._reduce(x, "dst", "sum", "g.sum_to_dst")

    def mean_to_dst(self, x: Any) -> Symbol:
        """Each node's mean over its incoming edges; 0 where there is none."""
        return self._reduce(x, "dst", "mean", "g.mean_to_dst")

    def max_to_dst(self, x: Any) -> Symbol:
        """Each node's maximum over its incoming edges; 0 where there is none above -inf.

        Ties share the gradient equally.
        """
        return self._reduce(x, "dst", "max", "g.max_to_dst")

    def sum_to_src(self, x: Any) -> Symbol:
        """Each node's sum over its outgoing edges; 0 where there is none."""
        return self._reduce(x, "src", "sum", "g.sum_to_src")

    def mean_to_src(self, x: Any) -> Symbol:
        """Each node's mean over its outgoing edges; 0 where there is none."""
        return self._reduce(x, "src", "mean", "g.mean_to_src")

    def max_to_src(self, x: Any) -> Symbol:
        """Each node's maximum over its outgoing edges; 0 where there is none above -inf."""
        return self._reduce(x, "src", "max", "g.max_to_src")

    def min_to_dst(self, x: Any) -> Symbol:
        """Each node's minimum over its incoming edges; 0 where there is none below inf.

        Ties share the gradient equally.
        """
        return self._reduce(x, "dst", "min", "g.min_to_dst")

    def min_to_src(self, x: Any) -> Symbol:
        """Each node's minimum over its outgoing edges; 0 where there is none below inf."""
        return self._reduce(x, "src", "min", "g.min_to_src")

    def prod_to_dst(self, x: Any) -> Symbol:
        """Each node's product over its incoming edges; 1 where there is none. Gradients are exact at zeros, too."""
        return self._reduce(x, "dst", "prod", "g.prod_to_dst")

    def prod_to_src(self, x: Any) -> Symbol:
        """Each node's product over its outgoing edges; 1 where there is none."""
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
        """Each node type's sum over its nodes; 0 where there is none."""
        return self._reduce_to_node_type(x, "sum", "g.sum_to_node_type")

    def mean_to_node_type(self, x: Any) -> Symbol:
        """Each node type's mean over its nodes; 0 where there is none."""
        return self._reduce_to_node_type(x, "mean", "g.mean_to_node_type")

    def max_to_node_type(self, x: Any) -> Symbol:
        """Each node type's maximum over its nodes; 0 where there is none above -inf."""
        return self._reduce_to_node_type(x, "max", "g.max_to_node_type")

    def min_to_node_type(self, x: Any) -> Symbol:
        """Each node type's minimum over its nodes; 0 where there is none below inf."""
        return self._reduce_to_node_type(x, "min", "g.min_to_node_type")

    def sum_to_edge_type(self, x: Any) -> Symbol:
        """Each edge type's sum over its edges (or pairs); 0 where there is none."""
        return self._reduce_to_edge_type(x, "sum", "g.sum_to_edge_type")

    def mean_to_edge_type(self, x: Any) -> Symbol:
        """Each edge type's mean over its edges (or pairs); 0 where there is none."""
        return self._reduce_to_edge_type(x, "mean", "g.mean_to_edge_type")

    def max_to_edge_type(self, x: Any) -> Symbol:
        """Each edge type's maximum over its edges (or pairs); 0 where there is none above -inf."""
        return self._reduce_to_edge_type(x, "max", "g.max_to_edge_type")

    def min_to_edge_type(self, x: Any) -> Symbol:
        """Each edge type's minimum over its edges (or pairs); 0 where there is none below inf."""
        return self._reduce_to_edge_type(x, "min", "g.min_to_edge_type")

    def sum_to_graph(self, x: Any) -> Symbol:
        """The sum over all rows, as a shared value; 0 where there is none."""
        return self._reduce_to_graph(x, "sum", "g.sum_to_graph")

    def mean_to_graph(self, x: Any) -> Symbol:
        """The mean over all rows, as a shared value; 0 where there is none."""
        return self._reduce_to_graph(x, "mean", "g.mean_to_graph")

    def max_to_graph(self, x: Any) -> Symbol:
        """The maximum over all rows, as a shared value; 0 where there is none above -inf."""
        return self._reduce_to_graph(x, "max", "g.max_to_graph")

    def min_to_graph(self, x: Any) -> Symbol:
        """The minimum over all rows, as a shared value; 0 where there is none below inf."""
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
        """Sums of rows with equal integers, as a shared value of feature shape (num, *F).

        Args:
          x: a value with rows, for example of nodes.
          ids: one integer per row, for example the graph of a batch that a node belongs to; an argument or a value of
            the same space. Rows whose integer is not in 0, ..., num - 1 are left out.
          num: the number of sums, a Python int.
        """
        return self._reduce_by(x, ids, num, "sum")

    def mean_by(self, x: Any, ids: Any, num: int) -> Symbol:
        """Means of rows with equal integers, as `sum_by`; 0 where there is no row."""
        return self._reduce_by(x, ids, num, "mean")

    def max_by(self, x: Any, ids: Any, num: int) -> Symbol:
        """Maxima of rows with equal integers, as `sum_by`; 0 where there is none above -inf.

        Ties share the gradient equally.
        """
        return self._reduce_by(x, ids, num, "max")

    def min_by(self, x: Any, ids: Any, num: int) -> Symbol:
        """Minima of rows with equal integers, as `sum_by`; 0 where there is none below inf."""
        return self._reduce_by(x, ids, num, "min")
