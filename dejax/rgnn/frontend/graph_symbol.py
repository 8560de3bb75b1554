"""The graph inside a program: what arrays stand for, reads on the edges, reductions."""

from __future__ import annotations

from typing import Any

from dejax.rgnn.frontend.symbols import Symbol
from dejax.rgnn.frontend.trace import Trace
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space


class GraphSymbol:
    """The graph inside a program: where values are read, typed and brought together."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    # what arguments stand for
    def node(self, x: Any) -> Symbol:
        """A value with one row a node."""
        return self._trace.declare(x, Space.NODE, "g.node")

    def edge(self, x: Any) -> Symbol:
        """A value with one row an edge, in the order of the edges that the graph was made from."""
        return self._trace.declare(x, Space.EDGE, "g.edge")

    def source_pair(self, x: Any) -> Symbol:
        """A value with one row a unique (sender, edge type) pair, numbered as in `RelGraph.by_source_pair`."""
        return self._trace.declare(x, Space.SOURCE_PAIR, "g.source_pair")

    def per_edge_type(self, w: Any) -> Symbol:
        """A weight or constant with one row an edge type."""
        return self._trace.declare(w, Space.EDGE_TYPE, "g.per_edge_type")

    def per_node_type(self, w: Any) -> Symbol:
        """A weight or constant with one row a node type."""
        return self._trace.declare(w, Space.NODE_TYPE, "g.per_node_type")

    def shared(self, w: Any) -> Symbol:
        """A weight or constant without rows, the same for all."""
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

    def in_degree(self, *, within_relation: bool = False, dtype: str = "float32") -> Symbol:
        """On each edge, how many edges arrive at its destination (of the same edge type, `within_relation`)."""
        via = "destination_pair" if within_relation else "dst"
        return self._trace.emit("gather", self._trace.emit("count", via=via, dtype=dtype), via=via)

    def out_degree(self, *, dtype: str = "float32") -> Symbol:
        """On each edge, how many edges leave its source."""
        return self._trace.emit("gather", self._trace.emit("count", via="src", dtype=dtype), via="src")

    # bringing together
    def _reduce(self, x: Any, via: str, how: str, method: str) -> Symbol:
        trace = self._trace
        if isinstance(x, Symbol) and x.space == Space.EDGE_TYPE:
            x = trace.emit("gather", x, via="etype")
        x = trace.declare(x, Space.EDGE, method)
        if how != "mean":
            return trace.emit("reduce", trace.counted(x) if how == "sum" else x, via=via, op=how)
        x = trace.floating(x)
        # Sums and counts of many edges are beyond 16 bits, their quotients not.
        wide = x if x.dtype in ("float32", "float64") else x.astype("float32")
        total = trace.emit("reduce", wide, via=via, op="sum")
        count = trace.emit("count", via=via, dtype=wide.dtype)
        one = trace.symbol(trace.builder.const(1.0, wide.dtype))
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
