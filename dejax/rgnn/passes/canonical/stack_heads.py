"""Heads that a loop computes one by one are computed together, with an axis of heads.

    concatenate([f(x @ w[0]), f(x @ w[1]), ...])      becomes    f(x @ w).reshape(-1),  w [H, k, d]
    concatenate([f(z[:d]), f(z[d:]), ...])            becomes    f(z.reshape(H, d)).reshape(-1)

The parts of a concatenation or stack are compared operator by operator. Where all parts have the same operators, each
group of equal operators becomes one. Parts that others read, too, and parts of different operators stay.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import ELEMENTWISE, TYPE_SPACES, Builder, Op, OpProgram
from dejax.rgnn.passes._rewrite import Rewrite

# (rows with heads, weight with heads) -> the contraction with heads of `k,kn->n`.
_SPECS = {(False, True): "k,hkn->hn", (True, True): "hk,hkn->hn", (True, False): "hk,kn->hn"}


def stack_heads(program: OpProgram, counts: Counts) -> OpProgram:
    return _StackHeads(program, counts).run()


class _Different(Exception):
    """Raised if the parts do not have the same operators."""


class _StackHeads(Rewrite):
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name != "concat" or op.space in TYPE_SPACES or len(op.args) < 2:
            return None
        parts = op.args
        stacked = len(op.shape) > 1
        if stacked:  # of rows with a new first axis
            made = [self.program.ops[p] for p in parts]
            if op.attr("axis") != 0 or any(m.name != "reshape" or m.shape[0] != 1 for m in made):
                return None
            rows = [self.program.ops[m.args[0]].shape for m in made]
            if any(m.shape[1:] != row for m, row in zip(made, rows, strict=True)):
                return None
            readers, parts = {*op.args}, tuple(m.args[0] for m in made)
        else:
            readers = {index}
        group = _Group(self, builder, len(parts))
        try:
            value = group.stacked(parts)
        except _Different:
            return None
        if not group.pays or not self.only_read_within(group.joined, readers):
            return None
        value = group.full(value)
        return value if stacked else builder.op("reshape", value, shape=op.shape)

    def only_read_within(self, joined: set[int], readers: set[int]) -> bool:
        """Whether only the heads and their concatenation read what all heads compute at once."""
        ops, inside = self.program.ops, joined | readers
        kept = (
            v for v in joined if ops[v].name not in ("gather", "slice", "reshape") and ops[v].space not in TYPE_SPACES
        )
        return all(v not in self.program.outputs and inside.issuperset(self.users[v]) for v in kept)


class _Group:
    """Values of several heads as one new value with a first axis of heads, of size 1 where all heads have one value."""

    def __init__(self, rewrite: Rewrite, builder: Builder, heads: int) -> None:
        self.rewrite, self.builder, self.heads = rewrite, builder, heads
        self.ops = rewrite.program.ops
        self.joined: set[int] = set()
        self.pays = False  # whether there is a product or a sum of edges for each head
        self.known: dict[tuple[int, ...], int] = {}

    def stacked(self, values: tuple[int, ...]) -> int:
        if values not in self.known:
            self.known[values] = self._stacked(values)
        return self.known[values]

    def _stacked(self, values: tuple[int, ...]) -> int:
        ops, builder = [self.ops[v] for v in values], self.builder
        first = ops[0]
        if len(set(values)) == 1:
            return builder.op("reshape", self.rewrite.new[values[0]], shape=(1, *first.shape))
        if any((o.space, o.shape, o.dtype) != (first.space, first.shape, first.dtype) for o in ops):
            raise _Different
        for found in (self.of_slices(ops), self.of_elements(ops)):
            if found is not None:
                return found
        if any((o.name, o.attrs, len(o.args)) != (first.name, first.attrs, len(first.args)) for o in ops):
            return self.side_by_side(values)
        if first.name in ("input", "const", "count") or not first.args:
            return self.side_by_side(values)
        self.joined.update(values)
        columns = [tuple(o.args[i] for o in ops) for i in range(len(first.args))]
        return self.operator(first, columns, values)

    def operator(self, op: Op, columns: list[tuple[int, ...]], values: tuple[int, ...]) -> int:
        builder = self.builder
        if op.name in ELEMENTWISE:
            args = [self.ranked(self.stacked(c), len(op.shape)) for c in columns]
            return builder.op(op.name, *args, **dict(op.attrs))
        if op.name == "linear":
            return self.product(op, *columns)
        if op.name in ("reduce", "softmax") and len(columns) == 1:
            self.pays = True
            return builder.op(op.name, self.full(self.stacked(columns[0])), **dict(op.attrs))
        if op.name == "gather":
            return builder.op("gather", self.stacked(columns[0]), **dict(op.attrs))
        if op.name == "dot":
            return builder.op("dot", *(self.full(self.stacked(c)) for c in columns))
        if op.name == "sum_features":
            axes = tuple(a + 1 for a in op.attr("axes"))
            return builder.op(
                "sum_features", self.full(self.stacked(columns[0])), axes=axes, keepdims=op.attr("keepdims")
            )
        if op.name == "reshape":
            return builder.op("reshape", self.full(self.stacked(columns[0])), shape=(self.heads, *op.shape))
        return self.side_by_side(values)

    def product(self, op: Op, rows: tuple[int, ...], weights: tuple[int, ...]) -> int:
        if op.attr("spec") != "k,kn->n" or op.attr("via") == "self":
            raise _Different
        self.pays = True
        x, rows_with_heads = self.side_of_product(rows)
        w, weights_with_heads = self.side_of_product(weights)
        if not (rows_with_heads or weights_with_heads):
            raise _Different
        return self.builder.op("linear", x, w, spec=_SPECS[rows_with_heads, weights_with_heads], via=op.attr("via"))

    def side_of_product(self, values: tuple[int, ...]) -> tuple[int, bool]:
        """Rows or weights of all heads, and whether they have an axis of heads; one value for all heads has none."""
        if len(set(values)) == 1:
            return self.rewrite.new[values[0]], False
        value = self.stacked(values)
        shape = self.builder.ops[value].shape
        return (value, True) if shape[0] == self.heads else (self.builder.op("reshape", value, shape=shape[1:]), False)

    def of_slices(self, ops: list[Op]) -> int | None:
        """Slices that lie side by side in one value: that value with an axis of heads."""
        first, size = ops[0], ops[0].attr("stop", 0) - ops[0].attr("start", 0)
        if any(o.name != "slice" or o.args != first.args or o.attr("axis") != first.attr("axis") for o in ops):
            return None
        axis, begin = first.attr("axis"), first.attr("start")
        if size < 1 or any(o.attr("start") != begin + i * size for i, o in enumerate(ops)):
            return None
        rows = self.side(first.args[0], axis, begin, begin + size * self.heads)
        shape = self.builder.ops[rows].shape
        split = self.builder.op("reshape", rows, shape=(*shape[:axis], self.heads, size, *shape[axis + 1 :]))
        return self.in_front(split, axis)

    def of_elements(self, ops: list[Op]) -> int | None:
        """`w[0]`, `w[1]`, ... of one value: the value itself."""
        if any(o.name != "reshape" or self.ops[o.args[0]].name != "slice" for o in ops):
            return None
        cuts = [self.ops[o.args[0]] for o in ops]
        axis, source, begin = cuts[0].attr("axis"), cuts[0].args[0], cuts[0].attr("start")
        rest = self.ops[source].shape
        if any(c.args[0] != source or c.attr("axis") != axis or c.shape[axis] != 1 for c in cuts):
            return None
        if (
            any(c.attr("start") != begin + i for i, c in enumerate(cuts))
            or ops[0].shape != rest[:axis] + rest[axis + 1 :]
        ):
            return None
        return self.in_front(self.side(source, axis, begin, begin + self.heads), axis)

    def side(self, value: int, axis: int, start: int, stop: int) -> int:
        new = self.rewrite.new[value]
        if (start, stop) == (0, self.ops[value].shape[axis]):
            return new
        return self.builder.op("slice", new, axis=axis, start=start, stop=stop)

    def in_front(self, value: int, axis: int) -> int:
        """The value with an axis moved to the front."""
        rank = len(self.builder.ops[value].shape)
        perm = (axis, *(a for a in range(rank) if a != axis))
        return value if axis == 0 else self.builder.op("transpose", value, perm=perm)

    def side_by_side(self, values: tuple[int, ...]) -> int:
        """Stacks the weights of different operators. Rows are not stacked, since that would copy them."""
        if self.ops[values[0]].space not in TYPE_SPACES:
            raise _Different
        shape = (1, *self.ops[values[0]].shape)
        return self.builder.op(
            "concat", *(self.builder.op("reshape", self.rewrite.new[v], shape=shape) for v in values), axis=0
        )

    def ranked(self, value: int, rank: int) -> int:
        """An operand of elementwise work on rows of some rank: a scalar for each head gets axes of size 1."""
        shape = self.builder.ops[value].shape
        if len(shape) == rank + 1:
            return value
        return self.builder.op("reshape", value, shape=(*shape, *(1,) * (rank + 1 - len(shape))))

    def full(self, value: int) -> int:
        shape = self.builder.ops[value].shape
        if shape[0] == self.heads:
            return value
        return self.builder.op("broadcast", value, shape=(self.heads, *shape[1:]))
