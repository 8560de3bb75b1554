"""Fusion, second half: reductions and the elementwise work around them become instances of the traversal template.

Reductions over the same rows share one loop when neither needs the other's result. The elementwise operators that lead
to them are computed edge by edge in registers, again in every loop that needs them; what shrank a feature axis and is
needed twice is written once, and so are the numbers that one loop can make for others (`_share_scalars.py`). A maximum, the sum
of exp(score - maximum) and sums weighted by it are one pass with a running maximum. Operators on the rows that follow a
reduction become its epilogue. Sums over the pairs of a node, of both kinds, are one instance (`_fuse_pair_sums.py`). Rows of
nodes that loops gather, and inner products of them, are made by loops without a reduction (`_node_maps.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dejax.rgnn.ir.inter import ROWWISE, VIAS, Op, Space
from dejax.rgnn.ir.intra import (
    BY_ROW,
    TILE_OPS,
    VECTOR_SPECS,
    Accumulator,
    Instance,
    Kernels,
    Operand,
    Term,
    Traversal,
    access_by,
    access_operand,
    as_part,
    can_weigh,
    refusal,
)
from dejax.rgnn.passes._fuse_pair_sums import put_beside
from dejax.rgnn.passes._node_maps import where_reached, write_nodes
from dejax.rgnn.passes._rewrite import Counts, factors, from_memory, moves_unit_axes, powers_of_two
from dejax.rgnn.passes._share_inner_products import made_once, share_in_order
from dejax.rgnn.passes._share_scalars import lead

_ITEM_SPACES = (Space.EDGE, Space.SOURCE_PAIR, Space.DESTINATION_PAIR)


@dataclass
class Loop:
    """A traversal in the making."""

    via: str | None
    space: Space
    accumulators: list[Accumulator] = field(default_factory=list)
    epilogue: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)  # item values that it writes
    beside: Loop | None = None

    @property
    def sums(self) -> set[int]:
        return {a.out for a in self.accumulators} | (set() if self.beside is None else self.beside.sums)

    @property
    def results(self) -> set[int]:
        return self.sums | set(self.epilogue) | set(self.items)


def fuse_traversal(kernels: Kernels, counts: Counts, *, leading: bool = True, half: bool = False) -> Kernels:
    """Adds the traversals.

    Args:
      kernels: a level-2 program.
      counts: of the graph.
      leading: one of them may make what others multiply rows by (`passes/_share_scalars.py`).
      half: rows that a traversal writes may be stored in 16 bits, so that a copy may be worth making.
    """
    return Fusion(kernels, counts, leading, half).run()


class Fusion:
    """The loops of one program, and what it takes to tell what each can do."""

    def __init__(self, kernels: Kernels, counts: Counts, leading: bool, half: bool) -> None:
        self.kernels, self.program, self.counts, self.leading = kernels, kernels.program, counts, leading
        self.half = half
        self.users = self.program.users()
        self.written = {v for instance in kernels.instances for v in instance.writes}
        # A product inside an instance whose value never reaches memory (it has an epilogue).
        self.inner = {i.product for i in kernels.instances if hasattr(i, "product")} - self.written
        self.refused = {i for i, op in enumerate(self.program.ops) if refusal(op) is not None}
        self.loops: list[Loop] = []
        self.once: dict[
            int, list[int]
        ] = {}  # by reduction, what its loop writes for others (`_share_inner_products.py`)

    def run(self) -> Kernels:
        for leading in (True, False) if self.leading else (False,):
            for absorb_first in (True, False):
                self.plan(leading=leading, absorb_first=absorb_first)
                if self.acyclic(self.loops):
                    return self.finished()
        return self.finished()

    def finished(self) -> Kernels:
        put_beside(self)
        made: list[Instance] = [self.finish(loop) for loop in self.loops]
        return Kernels(self.program, (*self.kernels.instances, *made))

    def plan(self, *, leading: bool, absorb_first: bool) -> None:
        """Makes the loops.

        Epilogues first leave fewer item values to write; but what an epilogue took may need an item value that only a
        later loop can write, and then they are taken last.
        """
        self.loops = []
        self.once = made_once(self)
        for i, op in enumerate(self.program.ops):
            loops = op.name == "reduce" and op.attr("via") != "all" and op.attr("op") in ("sum", "max")
            if loops and i not in self.written | self.refused:
                self.place(i, op)
        if self.once:
            share_in_order(self)
        if leading:
            lead(self)
        steps = [self.absorb_all, self.write_items]
        for step in steps if absorb_first else reversed(steps):
            step()
        write_nodes(self)

    def absorb_all(self) -> None:
        for loop in self.loops:
            if loop.via is not None:
                self.absorb(loop)

    # --- what a kernel can do in registers ---------------------------------------------------------------------------

    def on_tile(self, value: int) -> bool:
        """Whether a row of the value can be computed in registers from rows of its arguments."""
        op = self.program.ops[value]
        if value in self.written or value in self.inner or not self.refused.isdisjoint((value, *op.args)):
            return False
        if op.name == "linear":
            return op.attr("spec") in VECTOR_SPECS and op.attr("via") != "self"
        if op.name == "reshape":
            before = self.program.ops[op.args[0]].shape
            # Once for a row of nodes a tile may be laid out anew, where it has no padding.
            whole = op.space == Space.NODE and powers_of_two(*before, *op.shape)
            return whole or moves_unit_axes(op, self.program.ops[op.args[0]])
        return op.name in TILE_OPS

    def cone(self, roots: list[int], cut: set[int]) -> tuple[list[int], list[int]]:
        """The operators computed in registers for the roots, in order, and the values that are loaded."""
        body: set[int] = set()
        leaves: dict[int, None] = {}

        def visit(value: int, root: bool) -> None:
            if value in body or value in leaves:
                return
            if not self.on_tile(value) or (value in cut and not root):
                leaves[value] = None
                return
            body.add(value)
            op = self.program.ops[value]
            if op.name == "linear":  # the vectors of types are rows of another space: loaded, however they are made
                leaves[op.args[1]] = None
            for a in op.args[:1] if op.name == "linear" else op.args:
                visit(a, False)

        for root in roots:
            visit(root, root not in cut)
        return sorted(body), list(leaves)

    # --- dependencies between what is written ----------------------------------------------------------------------

    def needs(self, accumulator: Accumulator) -> list[int]:
        if accumulator.kind == "weighted":
            return [accumulator.value, *(t.value for t in accumulator.terms)]
        return [accumulator.value]

    def roots(self, loop: Loop) -> list[int]:
        """What the accumulators of a loop need."""
        return [v for a in loop.accumulators for v in self.needs(a)]

    def acyclic(self, loops: list[Loop]) -> bool:
        """Whether the loops, each done at once, can be put in some order."""
        owner = {v: loop for loop in loops for v in loop.results}
        colour: dict[int, int] = {}  # by id of a loop, or value

        def reach(node: Loop | int) -> bool:
            key = id(node) if isinstance(node, Loop) else ~node
            if colour.get(key) == 2:
                return True
            if colour.get(key) == 1:
                return False
            colour[key] = 1
            following = self.dependencies(node, owner) if isinstance(node, Loop) else list(self.program.ops[node].args)
            for v in following:
                if not reach(owner.get(v, v)):
                    return False
            colour[key] = 2
            return True

        return all(reach(loop) for loop in loops)

    def dependencies(self, loop: Loop, owner: dict[int, Loop]) -> list[int]:
        """Values that a loop needs from outside; what it computes in registers leads on to its arguments."""
        ops, own = self.program.ops, loop.results
        stack = self.roots(loop)
        stack += [v for i in (*loop.epilogue, *loop.items) for v in ops[i].args]
        found: dict[int, None] = {}
        seen: set[int] = set()
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in loop.items or (v not in owner and self.on_tile(v)):
                stack += ops[v].args
            elif v not in own:
                found[v] = None
        return list(found)

    # --- reductions --------------------------------------------------------------------------------------------------

    def place(self, i: int, op: Op) -> None:
        """Puts a reduction into a loop that is there, or opens one."""
        via, space = op.attr("via"), self.program.ops[op.args[0]].space
        for loop in reversed(self.loops):
            if loop.via != via:
                continue
            accumulator = self.weighted(i, op, loop) or Accumulator(op.attr("op"), i, op.args[0])
            if accumulator.kind != "weighted" and not self.share(accumulator, loop):
                continue
            loop.accumulators.append(accumulator)
            if self.acyclic(self.loops):
                return
            loop.accumulators.pop()
        self.loops.append(Loop(via, space, [Accumulator(op.attr("op"), i, op.args[0])], items=self.once.get(i, [])))

    def share(self, accumulator: Accumulator, loop: Loop) -> bool:
        """Whether a reduction loads an array that the loop loads already."""
        mine = set(self.cone(self.needs(accumulator), set())[1])
        theirs = set(self.cone(self.roots(loop), set())[1])
        return bool({self.program.ops[v].args or v for v in mine} & {self.program.ops[v].args or v for v in theirs})

    def weighted(self, i: int, op: Op, loop: Loop) -> Accumulator | None:
        """The reduction as a sum weighted by exp(score - largest), if the loop has that largest score."""
        if op.attr("op") != "sum":
            return None
        ops = self.program.ops
        found = factors(self.program, op.args[0])
        for at, factor in enumerate(found):
            exp = ops[factor.value]
            shifted = ops[exp.args[0]] if exp.name == "exp" else None
            if factor.power != 1 or shifted is None or shifted.name != "sub":
                continue
            score, largest = shifted.args
            read = ops[largest]
            if read.name != "gather" or read.attr("via") != loop.via:
                continue
            for number, a in enumerate(loop.accumulators):
                same = a.kind == "max" and a.out == read.args[0] and a.value == score
                if same and can_weigh(ops[score].shape, factor.inserts, op.shape):
                    rest = tuple(Term(f.value, f.power, f.inserts) for j, f in enumerate(found) if j != at)
                    return Accumulator("weighted", i, score, rest, number, factor.inserts)
        return None

    # --- item values that several need -------------------------------------------------------------------------------

    def write_items(self) -> None:
        """Item values that must reach memory are written by a loop that computes them, or by one of their own."""
        program = self.program
        wanted = [v for v in self.demanded() if program.ops[v].space in _ITEM_SPACES and self.on_tile(v)]
        done = {v for loop in self.loops for v in loop.results}
        wanted = [
            v for v in dict.fromkeys([*self.narrow(), *wanted]) if program.ops[v].name != "const" and v not in done
        ]
        for value in sorted(wanted):
            space = program.ops[value].space
            able = [loop for loop in self.loops if loop.space == space and self.computes(loop, value)]
            for loop in sorted(able, key=lambda loop: self.extra_width(loop, value)):
                loop.items.append(value)
                if self.acyclic(self.loops):
                    break
                loop.items.pop()
            else:
                self.loops.append(Loop(None, space, items=[value]))

    def map_of_nodes(self, values: list[int]) -> set[int]:
        """Adds a loop that makes the values of nodes, unless no order of all is possible then; what it gives."""
        self.loops.append(Loop(None, Space.NODE, items=values))
        if self.acyclic(self.loops):
            return set(values)
        self.loops.pop()
        return set()

    def from_memory(self, value: int) -> bool:
        return from_memory(self.program.ops[value], self.counts)

    def extra_width(self, loop: Loop, value: int) -> int:
        """Numbers that a loop loads for each item only because it computes the value."""
        roots = self.roots(loop)
        without = set(self.cone(roots, {value})[1])
        return sum(
            self.program.ops[v].width
            for v in self.cone([*roots, value], set())[1]
            if v not in without and self.program.ops[v].attr("via") != loop.via
        )

    def demanded(self, *tiled: Space) -> list[int]:
        """Values that must be arrays: outputs, and what GEMM instances and XLA operators read.

        XLA's are not those of items, or of the spaces `tiled`, that can be done in registers.
        """
        program, found = self.program, list(self.program.outputs)
        for instance in self.kernels.instances:
            found += instance.reads
        results = {v for loop in self.loops for v in loop.results}
        for i, op in enumerate(program.ops):
            by_template = i in self.written or i in self.inner or i in results
            if op.name == "gather" or not (by_template or (op.space in (*_ITEM_SPACES, *tiled) and self.on_tile(i))):
                found += op.args
        return found

    def narrow(self) -> list[int]:
        """Values much narrower than what they are made from, needed by more than one loop, and not at hand in all."""
        uses: dict[int, list[Loop]] = {}
        for loop in self.loops:
            body, _ = self.cone(self.roots(loop) + loop.items, self.led(loop))
            for v in body:
                uses.setdefault(v, []).append(loop)
        return [
            v
            for v, loops in uses.items()
            if len(loops) > 1 and self.shrinks(v) and not all(self.at_hand(v, loop) for loop in loops)
        ]

    def shrinks(self, value: int) -> bool:
        """Whether an operator leaves much less of its rows: an inner product."""
        ops = self.program.ops
        op = ops[value]
        return op.name in ("dot", "sum_features", "linear") and op.width * 4 <= max(ops[a].width for a in op.args)

    def led(self, loop: Loop) -> set[int]:
        """Item values that other loops write."""
        return {v for other in self.loops if other is not loop for v in other.items}

    def at_hand(self, value: int, loop: Loop) -> bool:
        """Whether a loop needs no more rows of its items to make the value: what it is made from is read anyway."""
        rest = self.cone(self.roots(loop) + loop.items, {value, *self.led(loop)})[1]
        made_from = self.cone([value], set())[1]
        return all(v in rest or access_operand(self.program, v, loop.via).access in BY_ROW for v in made_from)

    def computes(self, loop: Loop, value: int) -> bool:
        return value in self.cone(self.roots(loop) + loop.items, self.led(loop))[0]

    # --- rows --------------------------------------------------------------------------------------------------------

    def absorb(self, loop: Loop) -> None:
        """Takes the elementwise operators that follow on the rows into the loop's epilogue."""
        assert loop.via is not None
        rows = VIAS[loop.via].coarse
        if rows in (Space.EDGE_TYPE, Space.NODE_TYPE):  # a handful of rows: XLA fuses these with what follows
            return
        taken = {v for other in self.loops for v in other.results}
        for i, op in enumerate(self.program.ops):
            mine = {a.out for a in loop.accumulators} | set(loop.epilogue)
            if op.space != rows or i in taken or not mine.intersection(op.args):
                continue
            if self.joins(op, mine) or self.computable(i, op, mine):
                loop.epilogue.append(i)
                if not self.acyclic(self.loops):
                    loop.epilogue.pop()

    def computable(self, value: int, op: Op, mine: set[int]) -> bool:
        """Whether an operator can be done on the rows of a loop that has the results `mine`."""
        if not self.on_tile(value) or any(self.program.ops[a].name == "concat" for a in op.args):
            return False
        vector = op.name == "linear"  # times a vector of its type, which is read by the row's type
        if vector and (op.args[0] not in mine or op.attr("via") == "all" or not self.stays_on_row(value)):
            return False
        # A loop of numbers writes no rows that the next one can make of them.
        if vector and self.once and all(self.program.ops[v].width < op.width for v in mine):
            return False
        given = () if vector else tuple(a for a in op.args if a not in mine)
        if self.follows(given, mine):  # an array that is made from what this loop gives
            return False
        outside = [self.program.ops[a] for a in given]
        return not any((a.name == "gather" and a.attr("via") != "all") or a.width > 4 * op.width for a in outside)

    def joins(self, op: Op, mine: set[int]) -> bool:
        """Whether an operator only puts rows of the loop side by side, of one shape along the first of two axes."""
        side_by_side = op.name == "concat" and op.attr("axis") == 0 and len(op.shape) == 2
        if not side_by_side or not mine.issuperset(op.args) or refusal(op) is not None:
            return False
        shapes = {self.program.ops[a].shape for a in op.args}
        return len(shapes) == 1 and not any(self.program.ops[a].name == "concat" for a in op.args)

    def follows(self, values: tuple[int, ...], results: set[int]) -> bool:
        """Whether any of the values is computed from any of the results."""
        stack, seen = list(values), set(values)
        while stack:
            value = stack.pop()
            if value in results:
                return True
            new = [a for a in self.program.ops[value].args if a not in seen]
            seen.update(new)
            stack += new
        return False

    def stays_on_row(self, value: int) -> bool:
        """Whether only elementwise operators of its rows read the value, so that it need not be written for others."""
        ops = self.program.ops
        readers = [ops[u] for u in self.users[value]]
        return all(u.name in ROWWISE and u.space == ops[value].space for u in readers)

    def finish(self, loop: Loop) -> Traversal:
        program = self.program
        elsewhere = {v for other in self.loops if other is not loop for v in (*other.items, *other.epilogue)}
        body, operands = self.operands(loop, elsewhere)
        operands = where_reached(self, loop, operands)
        results = loop.sums
        inside = results | set(loop.epilogue)
        for i in loop.epilogue:
            if program.ops[i].name == "linear":
                weight = program.ops[i].args[1]
                operands.append(Operand(weight, weight, "row_indexed", program.ops[i].attr("via")))
                continue
            outside = [a for a in program.ops[i].args if a not in inside and program.ops[a].name != "const"]
            operands += [self.row_operand(a, loop.via) for a in outside]
        unique = tuple({(o.name, o.access, o.via): o for o in operands}.values())
        # What it sums goes to the epilogue.
        beside = None if loop.beside is None else replace(self.finish(loop.beside), row_outputs=())
        produced = sorted(results) + loop.epilogue
        outputs = set(program.outputs)
        row_outputs = tuple(v for v in produced if v in outputs or self.read_outside(v, loop, results, body))
        return Traversal(
            via=loop.via,
            space=loop.space,
            operands=unique,
            body=tuple(body),
            accumulators=tuple(loop.accumulators),
            epilogue=tuple(loop.epilogue),
            item_outputs=tuple(loop.items),
            row_outputs=row_outputs,
            beside=beside,
        )

    def operands(self, loop: Loop, elsewhere: set[int]) -> tuple[list[int], list[Operand]]:
        """What a loop computes item by item, and what it reads for that; `elsewhere` are values that others write."""
        program = self.program
        body, leaves = self.cone(self.roots(loop) + loop.items, elsewhere)
        operands = [as_part(program, access_operand(program, v, loop.via)) for v in leaves]
        for i in body:  # vectors by type are read as operands of their own
            op = program.ops[i]
            if op.name == "linear":
                weight = op.args[1]
                read = Operand(weight, weight, *access_by(op.attr("via"), loop.via))
                operands = [o for o in operands if o.name != weight] + [read]
        return body, operands

    def row_operand(self, value: int, via: str | None) -> Operand:
        """How an epilogue reads a value of the row."""
        operand = access_operand(self.program, value)
        return operand if operand.access == "shared" else as_part(self.program, Operand(value, value, "row", via))

    def read_outside(self, value: int, loop: Loop, results: set[int], body: list[int]) -> bool:
        """Whether anything but the loop itself needs a row value."""
        inside = set(loop.epilogue)
        for u in self.users[value]:
            if u in inside:
                continue
            gathered = self.program.ops[u].name == "gather" and self.program.ops[u].attr("via") == loop.via
            if gathered and all(self.softmax_only(w, loop, u) for w in self.users[u]) and u not in self.program.outputs:
                continue
            return True
        return False

    def softmax_only(self, value: int, loop: Loop, read: int) -> bool:
        """Whether score - largest is used for nothing but this loop's weighted sums."""
        op = self.program.ops[value]
        scores = {a.value for a in loop.accumulators if a.kind == "weighted"}
        if op.name != "sub" or op.args[1] != read or op.args[0] not in scores or value in self.program.outputs:
            return False
        weighted = {a.out for a in loop.accumulators if a.kind == "weighted"}

        def ends(v: int) -> bool:
            if v in self.program.outputs:
                return False
            return bool(self.users[v]) and all(
                u in weighted or (self.program.ops[u].name in ("exp", "mul", "div", "reshape", "cast") and ends(u))
                for u in self.users[v]
            )

        return ends(value)
