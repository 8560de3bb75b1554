"""Compact materialization (Hector, section 3.2.2).

A value that depends only on (source, relation) is computed once for each unique pair, not once for each edge. In
general each edge value has an anchor, the smallest space that determines it: a node at one end, an edge type, a unique
(source, type) or (destination, type) pair, or the edge itself. Grouped GEMMs and inner products move to their anchor,
and so do elementwise functions of values that are there already. Edges then gather the result.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import RATES, Counts, Work
from dejax.rgnn.ir.inter import COMPOSED_VIAS, OPERATORS, ROWWISE, Builder, Op, OpProgram, Space, is_float
from dejax.rgnn.ir.operators import Infinite, named
from dejax.rgnn.passes._rewrite import unless_empty

# An anchor has the name of the map from edges to it; "edge" and "all" are the finest and the coarsest.
_WITHIN = {  # the anchors that a pair determines
    "source_pair": {"src", "etype", "source_pair"},
    "destination_pair": {"dst", "etype", "destination_pair"},
}
_PAIRS = {"source_pair": Space.SOURCE_PAIR, "destination_pair": Space.DESTINATION_PAIR}
_SPACE = {**_PAIRS, "src": Space.NODE, "dst": Space.NODE, "etype": Space.EDGE_TYPE, "all": Space.GRAPH}
# Functions whose value or slope can be infinite. On nodes they would also apply to rows that no edge reads, and there
# backward would multiply 0 by infinity. They stay on edges, or on pairs, each of which has an edge. Where they follow a
# reduction of wide rows, as in a layer norm, they move to the nodes and are given 1 for rows that no edge reads.
PARTIAL = named(lambda o: o.infinite is not Infinite.NOWHERE)
_REDUCES = frozenset({"sum_features", "extremum_features", "dot"})
_WIDE = 8


def _join(anchors: list[str]) -> str:
    """The coarsest anchor that determines all of the given anchors."""
    found = set(anchors) - {"all"}
    if len(found) <= 1:
        return found.pop() if found else "all"
    return next((pair for pair, within in _WITHIN.items() if found <= within), "edge")


def compact(program: OpProgram, counts: Counts) -> OpProgram:
    return _Compaction(program, counts).run()


class UnreadRows:
    """Rows of nodes and types that no edge reads. Functions moved to them from the edges must not give infinities."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.known: dict[int, bool] = {}

    def one(self, x: int, anchor: str) -> int:
        """A value of nodes or types, with 1 in rows that no edge reads."""
        op = self.builder.ops[x]
        if op.name == "const" or op.space != _SPACE[anchor]:
            return x
        return unless_empty(self.builder, anchor, x, 1.0)

    def may_be_infinite(self, x: int) -> bool:
        """Whether a value of nodes or types is made with a quotient, say by the number of edges, which may be 0.

        Or whether it is an input with one element a row: a user may have made it with such a quotient.
        """
        if x not in self.known:
            op = self.builder.ops[x]
            found = op.name == "input" and op.width == 1 and is_float(op.dtype)
            if OPERATORS[op.name].infinite is Infinite.VALUE:
                found = not self.is_positive(op.args[op.name == "div"])
            if op.name == "linear" or (op.name in ROWWISE and op.name != "select"):
                found |= any(self.may_be_infinite(a) for a in op.args)
            self.known[x] = found
        return self.known[x]

    def is_positive(self, x: int) -> bool:
        """Whether a divisor is certainly not 0: a constant, or the sum or maximum of a value and a constant."""
        op = self.builder.ops[x]
        if op.name in ("sqrt", "reshape", "broadcast", "cast"):
            return self.is_positive(op.args[0])
        others = [self.builder.ops[a] for a in op.args] if op.name in ("add", "max") else [op]
        return any(o.name == "eq" or (o.name == "const" and o.attr("value") != 0) for o in others)


class _Compaction:
    def __init__(self, program: OpProgram, counts: Counts) -> None:
        self.program, self.counts = program, counts
        self.users = program.users()
        self.builder = Builder(program.name)
        self.new: dict[int, int] = {}  # old value -> new value, at its anchor if it is an edge value
        self.anchor: dict[int, str] = {}  # of edge values
        self.lifted: dict[tuple[int, str, str], int] = {}
        self.unread = UnreadRows(self.builder)
        self.reduces = self.after_reductions()

    def run(self) -> OpProgram:
        for i, op in enumerate(self.program.ops):
            self.builder.line = self.program.lines[i] if self.program.lines else None
            if op.space == Space.EDGE:
                self.edge_op(i, op)
            else:
                self.new[i] = self.builder.copy(op, (self.on_edge(a) for a in op.args), self.builder.line)
        return self.builder.build(self.on_edge(o) for o in self.program.outputs)

    def after_reductions(self) -> set[int]:
        """The edge values that follow a reduction of the features of wide rows."""
        ops, found = self.program.ops, set[int]()
        for i, op in enumerate(ops):
            wide = op.name in _REDUCES and any(ops[a].width >= _WIDE for a in op.args)
            if op.space == Space.EDGE and op.name in ROWWISE and (wide or not found.isdisjoint(op.args)):
                found.add(i)
        return found

    def on_edge(self, old: int) -> int:
        """The new value of an old one; a value of edges is gathered by the edges."""
        if self.program.ops[old].space != Space.EDGE:
            return self.new[old]
        return self.lift(self.new[old], self.anchor[old], "edge")

    def edge_op(self, i: int, op: Op) -> None:
        if op.name == "const":
            self.new[i], self.anchor[i] = self.builder.const(op.attr("value"), op.dtype), "all"
            return
        if op.name == "gather":
            self.new[i], self.anchor[i] = self.new[op.args[0]], op.attr("via")
            return
        anchor = self.choose(i, op)
        args = []
        for a in op.args:  # weights and tables are values of types, or shared
            edge = self.program.ops[a].space == Space.EDGE
            args.append(self.lift(self.new[a], self.anchor[a], anchor) if edge else self.new[a])
        if anchor in ("src", "dst", "etype"):
            partial = op.name in PARTIAL
            args = [self.unread.one(a, anchor) if partial or self.unread.may_be_infinite(a) else a for a in args]
        attrs = dict(op.attrs)
        if op.name == "linear" and attrs["via"] == "etype" and anchor != "edge":
            attrs["via"] = "self" if anchor == "etype" else f"{anchor}.etype"
        self.new[i], self.anchor[i] = self.builder.op(op.name, *args, **attrs), anchor

    def choose(self, i: int, op: Op) -> str:
        if op.name not in ROWWISE and op.name != "linear":
            return "edge"
        anchors = [self.anchor[a] for a in op.args if self.program.ops[a].space == Space.EDGE]
        typed = op.name == "linear" and op.attr("via") == "etype"
        joined = _join([*anchors, *(["etype"] if typed else [])])
        if joined in ("edge", "all"):
            return joined
        # A product of a row multiplies once with each element of the weight.
        multiplications = self.program.ops[op.args[1]].width if op.name == "linear" else 0
        if not self.pays(joined, op.row_bytes, multiplications):
            return "edge"
        if joined in _PAIRS:
            return joined if op.name in ("linear", "dot") or joined in anchors else "edge"
        if op.name in PARTIAL and (joined == "etype" or not (i in self.reduces or self.feeds_reduction(i))):
            return "edge"
        return joined

    def pays(self, anchor: str, row_bytes: int, multiplications: int) -> bool:
        """Whether rows at an anchor, each made by `multiplications`, take less time than rows of edges.

        Rows of pairs are read by one more index.
        """
        rows, edges = self.counts.rows(_SPACE[anchor]), self.counts.edges
        moved = rows / (RATES.by_index if anchor in _PAIRS else 1)
        once = Work().move(moved, row_bytes).multiply(rows, multiplications)
        return once.seconds() < Work().move(edges, row_bytes).multiply(edges, multiplications).seconds()

    def feeds_reduction(self, i: int) -> bool:
        """Whether reductions of features alone read an elementwise function of wide rows."""
        ops, users = self.program.ops, self.users[i]
        return ops[i].width >= _WIDE and bool(users) and all(ops[u].name in _REDUCES for u in users)

    def lift(self, value: int, have: str, want: str) -> int:
        """Reads a value of one anchor at each row of a finer anchor."""
        if have == want:
            return value
        key = (value, have, want)
        if key not in self.lifted:
            self.lifted[key] = self._lift(value, have, want)
        return self.lifted[key]

    def _lift(self, value: int, have: str, want: str) -> int:
        builder = self.builder
        if have == "all":
            return builder.lift(value, Space.EDGE if want == "edge" else _SPACE[want])
        if want == "edge":
            return builder.op("gather", value, via=have)
        step = next(inner for (outer, inner), whole in COMPOSED_VIAS.items() if outer == want and whole == have)
        return builder.op("gather", value, via=step)
