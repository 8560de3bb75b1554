"""Traversals in the making: what each computes, loads and stores, and which of them must run before others.

Every step of the fusion (`fuse_traversal.py`) adds to the traversals of one `Fusion` and asks it what is possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Space
from dejax.rgnn.ir.intra import Accumulator, Gemm, Kernels, Operand, access_operand, as_part, in_order
from dejax.rgnn.ir.templates import ONCE_A_SEGMENT, TILE_OPS, VECTOR_SPECS, access_by, refusal
from dejax.rgnn.passes._rewrite import moves_unit_axes, powers_of_two

ENTRY_SPACES = (Space.EDGE, Space.SOURCE_PAIR, Space.DESTINATION_PAIR)
# A scalar or row counts as narrow beside another row that is at least this many times as wide.
NARROWER = 4


@dataclass
class TraversalPlan:
    """A traversal that the pass is still extending.

    Attributes:
      via: the map whose coarse rows are the segments; None for a traversal without segments.
      space: the space of the entries.
      accumulators: the reductions.
      epilogue: operators on the reduced rows.
      stored: values of entries that the traversal writes.
    """

    via: str | None
    space: Space
    accumulators: list[Accumulator] = field(default_factory=list)
    epilogue: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)

    @property
    def roots(self) -> list[int]:
        """The values of entries that the accumulators read."""
        return [v for a in self.accumulators for v in a.reads]

    @property
    def computed(self) -> list[int]:
        """The values of entries that the accumulators read or the traversal stores."""
        return self.roots + self.stored

    @property
    def sums(self) -> set[int]:
        return {a.out for a in self.accumulators}

    @property
    def results(self) -> set[int]:
        return self.sums | set(self.epilogue) | set(self.stored)


class Fusion:
    """The traversals planned for one program, and what can be asked of them.

    Attributes:
      traversals: the plan.
      written: values that instances before the traversals write.
      inner: grouped GEMMs inside an instance whose own result never reaches memory, because of an epilogue.
      refused: values that no traversal can read or compute.
      row_scaled: rows that a traversal writes may be stored as row-scaled float16.
    """

    def __init__(self, kernels: Kernels, counts: Counts, row_scaled: bool) -> None:
        self.kernels, self.program, self.counts, self.row_scaled = kernels, kernels.program, counts, row_scaled
        self.users = self.program.users()
        self.written = {v for instance in kernels.instances for v in instance.writes}
        self.inner = {i.product for i in kernels.instances if isinstance(i, Gemm)} - self.written
        self.refused = {i for i, op in enumerate(self.program.ops) if refusal(op) is not None}
        self.traversals: list[TraversalPlan] = []

    # --- what a kernel computes in registers -------------------------------------------------------------------------

    def in_registers(self, value: int) -> bool:
        """Whether a row of the value can be computed in registers from rows of its arguments."""
        op = self.program.ops[value]
        if value in self.written or value in self.inner or not self.refused.isdisjoint((value, *op.args)):
            return False
        if op.name == "linear":
            return op.attr("spec") in VECTOR_SPECS and op.attr("via") != "self"
        if op.name == "reshape":
            before = self.program.ops[op.args[0]].shape
            # A tile without padding may change its layout, because that happens once for a row of nodes.
            whole = op.space == Space.NODE and powers_of_two(*before, *op.shape)
            return whole or moves_unit_axes(op, self.program.ops[op.args[0]])
        return op.name in TILE_OPS

    def cone(self, roots: list[int], loaded: set[int]) -> tuple[list[int], list[int]]:
        """The operators computed in registers for the roots, in order, and the values that are loaded for them.

        Args:
          roots: values of one space.
          loaded: values that are loaded even where they could be computed.
        """
        body: set[int] = set()
        leaves: dict[int, None] = {}

        def visit(value: int) -> None:
            if value in body or value in leaves:
                return
            if not self.in_registers(value) or value in loaded:
                leaves[value] = None
                return
            body.add(value)
            op = self.program.ops[value]
            if op.name == "linear":  # the vectors of types are rows of another space: loaded, however they are made
                leaves[op.args[1]] = None
            for a in op.args[:1] if op.name == "linear" else op.args:
                visit(a)

        for root in roots:
            visit(root)
        return sorted(body), list(leaves)

    def operands(self, traversal: TraversalPlan) -> tuple[list[int], list[Operand]]:
        """The operators that a traversal computes for each entry, and the operands that it loads for them."""
        program = self.program
        body, leaves = self.cone(traversal.computed, self.stored_elsewhere(traversal))
        operands = [as_part(program, access_operand(program, v, traversal.via)) for v in leaves]
        for op in (program.ops[i] for i in body):
            if op.name == "linear":  # vectors by type are operands of their own
                weight = op.args[1]
                read = Operand(weight, weight, *access_by(op.attr("via"), traversal.via))
                operands = [o for o in operands if o.name != weight] + [read]
        return body, operands

    def epilogue_operands(self, traversal: TraversalPlan) -> list[Operand]:
        """The operands that the epilogue of a traversal loads for each reduced row."""
        program, operands = self.program, list[Operand]()
        inside = traversal.sums | set(traversal.epilogue)
        for op in (program.ops[i] for i in traversal.epilogue):
            if op.name == "linear":
                operands.append(Operand(op.args[1], op.args[1], "row_indexed", op.attr("via")))
                continue
            for value in (a for a in op.args if a not in inside and program.ops[a].name != "const"):
                operand = access_operand(program, value)
                row = operand.access != "shared"
                operands.append(as_part(program, Operand(value, value, "row", traversal.via)) if row else operand)
        return operands

    def reads(self, traversal: TraversalPlan) -> list[int]:
        """The arrays that a traversal loads."""
        return [o.value for o in (*self.operands(traversal)[1], *self.epilogue_operands(traversal))]

    def narrows(self, value: int) -> bool:
        """Whether an operator sums rows to much narrower ones: an inner product."""
        op, ops = self.program.ops[value], self.program.ops
        widest = max((ops[a].width for a in op.args), default=0)
        return op.name in ("dot", "sum_features", "linear") and op.width * NARROWER <= widest

    def read_once_per_row(self, value: int, via: str | None) -> bool:
        """Whether a traversal of the segments of `via` loads the value once for all entries of each."""
        return access_operand(self.program, value, via).access in ONCE_A_SEGMENT

    # --- which traversal needs what ----------------------------------------------------------------------------------

    def stored_elsewhere(self, traversal: TraversalPlan) -> set[int]:
        """Values that other traversals compute and store: of entries, and of reduced rows."""
        return {v for other in self.traversals if other is not traversal for v in (*other.stored, *other.epilogue)}

    def computes(self, traversal: TraversalPlan, value: int) -> bool:
        return value in self.cone(traversal.computed, self.stored_elsewhere(traversal))[0]

    def has_operands_of(self, value: int, traversal: TraversalPlan) -> bool:
        """Whether a traversal can compute the value without loading more rows of its entries."""
        rest = self.cone(traversal.computed, {value, *self.stored_elsewhere(traversal)})[1]
        return all(v in rest or self.read_once_per_row(v, traversal.via) for v in self.cone([value], set())[1])

    def must_be_arrays(self, *tiled: Space) -> list[int]:
        """Values that must be arrays: outputs, and what GEMM instances and XLA operators read.

        Operators on entries, or in the spaces `tiled`, that can be computed in registers do not count as XLA's.
        """
        program, found = self.program, list(self.program.outputs)
        for instance in self.kernels.instances:
            found += instance.reads
        results = {v for traversal in self.traversals for v in traversal.results}
        for i, op in enumerate(program.ops):
            by_template = i in self.written or i in self.inner or i in results
            if op.name == "gather" or not (
                by_template or (op.space in (*ENTRY_SPACES, *tiled) and self.in_registers(i))
            ):
                found += op.args
        return found

    def from_memory(self, value: int) -> bool:
        return self.counts.from_memory(self.program.ops[value])

    # --- the order of the traversals ---------------------------------------------------------------------------------

    def extend(self, results: list, new: list) -> bool:
        """Adds `new` to a list of the plan if the traversals then still have an order. Returns whether it was added."""
        results += new
        if self.acyclic():
            return True
        del results[len(results) - len(new) :]
        return False

    def acyclic(self) -> bool:
        """Whether the instances can run one after another in some order, and no two write one value."""
        planned = [(self.reads(traversal), traversal.results) for traversal in self.traversals]
        made = [(instance.reads, instance.writes) for instance in self.kernels.instances]
        return in_order(self.program, [*planned, *made]) is not None

    def depends_on(self, values: tuple[int, ...], results: set[int]) -> bool:
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
