"""Before and after which exchanges each value of a program is known.

Stages alternate. Stage 0 computes on each device's own nodes, stage 1 on its edges, stage 2 on its own nodes again, and
so on; collectives run between them. The level of a value is the number of the first stage that can compute it. A node
value may be needed in two forms: `own` (rows of the device's own nodes are right) and `local` (rows of halo nodes are
right, too).
"""

from __future__ import annotations

from dejax.distributed.full_graph._cut import least_cut
from dejax.distributed.full_graph._rewrite import REPLICATED, is_crossing_reduction
from dejax.rgnn.ir.inter import ROWWISE, Op, OpProgram, Space
from dejax.rgnn.passes.forms.compact import PARTIAL


def odd(level: int) -> int:
    return level if level % 2 else level + 1


def even(level: int) -> int:
    return level + level % 2


class Levels:
    """The levels of a prepared program.

    Attributes:
        program: the program.
        sent: the node values that cross between devices.
        own: level of each node value, rows of own nodes.
        local: level of each node value that is needed on halo nodes; those in `sent` arrive before it.
        edge: level of each value of edges or destination pairs.
        shared: level from which each value of types or of the whole graph is known.
        free: values that any stage makes itself: constants, weights, and weights read by rows.
    """

    def __init__(self, program: OpProgram) -> None:
        self.program = program
        self.free = [False] * len(program.ops)
        for i, op in enumerate(program.ops):
            self.free[i] = self._is_free(op)
        self.sent, self.on_halo = self._sent()
        self.own: dict[int, int] = {}
        self.local: dict[int, int] = {}
        self.edge: dict[int, int] = {}
        self.shared: dict[int, int] = {}
        for i, op in enumerate(program.ops):
            if op.space in REPLICATED:
                self.shared[i] = self._shared(i, op)
            elif op.space == Space.NODE:
                self.own[i] = self._own(i, op)
                if i in self.on_halo:
                    self.local[i] = self._local(i, op)
            else:
                self.edge[i] = self._edge(i, op)

    def crosses(self, i: int) -> bool:
        """Whether a value is a reduction over rows of several devices."""
        return is_crossing_reduction(self.program, self.program.ops[i])

    def _is_free(self, op: Op) -> bool:
        if op.name == "const":
            return True
        if op.space in REPLICATED:
            return not is_crossing_reduction(self.program, op)
        if op.name == "gather" and self.program.ops[op.args[0]].space in REPLICATED:
            return True
        of_free = bool(op.args) and all(self.free[a] for a in op.args)
        return of_free and op.space == Space.NODE and op.name in ROWWISE

    # ------------------------------------------------------------------------------------------ what crosses

    def _sent(self) -> tuple[set[int], set[int]]:
        """The values to send, and the values that are needed on halo nodes, these included."""
        ops = self.program.ops
        readers = {op.args[0] for op in ops if op.name == "gather" and op.attr("via") == "src"}
        readers = {r for r in readers if not self.free[r]}
        arguments: dict[int, list[int]] = {}
        queue = sorted(readers, reverse=True)
        while queue:
            i = queue.pop()
            if i not in arguments:
                arguments[i] = [a for a in self._node_args(i) if not self.free[a]]
                queue += arguments[i]
        weights = {i: max(ops[i].row_bytes, 1) for i in arguments}
        sent = least_cut(arguments, weights, readers)
        needed, queue = set(sent), sorted(readers)
        while queue:
            i = queue.pop()
            if i not in needed:
                needed.add(i)
                queue += arguments[i]
        return sent, needed

    def _node_args(self, i: int) -> list[int]:
        """The node values that a node value is computed of, node by node; none where the owner alone can make it."""
        op = self.program.ops[i]
        if op.name in ("input", "reduce", "count"):
            return []
        return [a for a in op.args if self.program.ops[a].space == Space.NODE]

    # ------------------------------------------------------------------------------------------ levels

    def home(self, i: int) -> int:
        """The stage that makes each device's part of a reduction over devices."""
        op = self.program.ops[i]
        if op.name == "count":
            space = Space(op.attr("space")) if op.attr("via") == "all" else None
            return 0 if op.attr("via") == "ntype" or space == Space.NODE else 1
        rest = max(self._level(a) for a in op.args)
        return even(rest) if self.program.ops[op.args[0]].space == Space.NODE else odd(rest)

    def _level(self, i: int) -> int:
        op = self.program.ops[i]
        if self.free[i] and op.space not in REPLICATED:  # made of shared values and constants
            return max((self._level(a) for a in op.args), default=0)
        return next(levels[i] for levels in (self.own, self.edge, self.shared) if i in levels)

    def _shared(self, i: int, op: Op) -> int:
        return self.home(i) + 1 if self.crosses(i) else max((self._level(a) for a in op.args), default=0)

    def _own(self, i: int, op: Op) -> int:
        if op.name == "input":
            return 0
        if self.crosses(i):
            return self.home(i) + 1
        if op.name == "count":
            return 1
        if op.name == "reduce":
            return odd(max(self._level(a) for a in op.args))
        level = max((self._level(a) for a in op.args), default=0)
        if level % 2 and any(self.own.get(a) == level for a in op.args) and self._fuses(op):
            return level
        return even(level)

    def _fuses(self, op: Op) -> bool:
        """Whether an operator of own nodes may run on all rows of a part behind a reduction over edges.

        Rows of halo nodes are zeros there. A function that is infinite at zeros would give gradients of weights NaN;
        a product would multiply rows that no operator reads.
        """
        if op.name == "linear" or op.name in ("lookup", "place"):
            return False
        if op.name == "div":
            divisor = self.program.ops[op.args[1]]
            bounds = [self.program.ops[a] for a in divisor.args] if divisor.name == "max" else []
            return any(b.name == "const" and b.attr("value") > 0 for b in map(self._constant, bounds))
        return op.name not in PARTIAL

    def _constant(self, op: Op) -> Op:
        """A constant behind reads by rows."""
        while op.name in ("gather", "reshape", "cast", "broadcast"):
            op = self.program.ops[op.args[0]]
        return op

    def _local(self, i: int, op: Op) -> int:
        if i in self.sent:
            return odd(self.own[i] + 1)
        return odd(max((self.local[a] if a in self.local else self._level(a) for a in op.args), default=0))

    def _edge(self, i: int, op: Op) -> int:
        levels = [1]
        for a in op.args:
            reads_source = op.name == "gather" and op.attr("via") == "src" and a in self.local
            levels.append(self.local[a] if reads_source else self._level(a))
        return odd(max(levels))
