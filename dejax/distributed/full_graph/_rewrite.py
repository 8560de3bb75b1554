"""Level-1 rewrites before a program is cut into stages: node-wise work onto nodes, reductions over devices as sums."""

from __future__ import annotations

from collections.abc import Callable

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import ROWWISE, VIAS, Builder, Op, OpProgram, Space, is_float
from dejax.rgnn.passes._rewrite import rebuild
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.canonical.split_products import split_products
from dejax.rgnn.passes.canonical.split_rows import split_rows
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.forms.compact import PARTIAL, UnreadRows

CROSSING = ("src", "all", "ntype", "etype")
"""Maps whose segments have rows on several devices; those by destination lie on one."""


REPLICATED = (Space.EDGE_TYPE, Space.NODE_TYPE, Space.GRAPH)
"""Spaces of which every device has all rows."""


SOURCE_PAIRS = (
    "values of source pairs must not be used over a mesh, where a pair's edges lie on several devices; use values of "
    "nodes or edges (for R-GCN without features give features, or `bases`)"
)


class CannotDistribute(ValueError):
    """The program has an operation that is not supported on a `ShardedGraph`.

    The message names its line and the remedy.

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> from dejax.distributed import make_mesh
    >>> from dejax.distributed.full_graph import CannotDistribute, ShardedGraph, over_mesh
    >>> @rgnn.program
    ... def product(g, x):
    ...     return g.prod_to_src(g.dst(x))
    >>> graph = rgnn.RelGraph.from_edges([0], [1], num_nodes=2)
    >>> split = ShardedGraph.from_graph(graph, [0, 1], make_mesh(2))  # doctest: +SKIP
    >>> over_mesh(product)(split, split.shard_nodes(jnp.ones((2, 3))))  # doctest: +SKIP
    """


def refuse(program: OpProgram, index: int, why: str) -> CannotDistribute:
    line = program.lines[index] if program.lines else None
    return CannotDistribute(f"{line or program.name}: {why}")


def prepared(program: OpProgram, counts: Counts) -> OpProgram:
    """The program with what crosses devices in the form that `stages` takes."""
    check(program)
    program = _with_sums(program)
    for run in (cse, split_products, split_rows, dce):
        program = run(program, counts)
    return dce(cse(_on_nodes(program), counts), counts)


def check(program: OpProgram) -> None:
    """Raises CannotDistribute for what is not supported over devices."""
    for index, op in enumerate(program.ops):
        _check(program, index, op)


def _check(program: OpProgram, index: int, op: Op) -> None:
    if op.space == Space.SOURCE_PAIR or "source_pair" in str(op.attr("via", "")):
        raise refuse(program, index, SOURCE_PAIRS)
    if op.space == Space.DESTINATION_PAIR and op.name == "input":
        raise refuse(program, index, "arguments with one row for each destination pair must not be used over a mesh")
    if op.name == "reduce" and op.attr("op") == "prod" and op.attr("via") in CROSSING and op.args:
        raise refuse(
            program,
            index,
            "products of rows on several devices are not supported; use a sum of logarithms, or g.prod_to_dst",
        )


def _with_sums(program: OpProgram) -> OpProgram:
    """Softmax and extrema over rows on several devices as extrema without gradient, and sums.

    y = max x      becomes    m = max x without gradient ;  e = (x == m) ;  y = sum of x where e / sum of e

    Ties share the gradient, as they do on one device.
    """

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.attr("via") not in CROSSING or not op.args or program.ops[op.args[0]].space in REPLICATED:
            return None
        if op.name == "softmax":
            return _softmax(builder, op, args[0])
        if op.name == "reduce" and op.attr("op") in ("max", "min"):
            fixed = builder.op("stop_gradient", args[0])
            extremum = builder.op("reduce", fixed, via=op.attr("via"), op=op.attr("op"))
            if not is_float(op.dtype):
                return extremum
            back = builder.read_back(extremum, op.attr("via"), builder.ops[args[0]].space)
            return _shared_by_ties(
                builder, args[0], back, lambda rows: builder.op("reduce", rows, via=op.attr("via"), op="sum")
            )
        if op.name == "place" and op.attr("op") in ("max", "min"):
            fixed = builder.op("stop_gradient", args[0])
            attrs = dict(op.attrs)
            extremum = builder.op("place", fixed, args[1], **attrs)
            if not is_float(op.dtype):
                return extremum
            back = builder.op("lookup", extremum, args[1], via=op.attr("via"), outside=op.attr("outside"))
            return _shared_by_ties(
                builder, args[0], back, lambda rows: builder.op("place", rows, args[1], **{**attrs, "op": "sum"})
            )
        return None

    return rebuild(program, visit)


def _softmax(builder: Builder, op: Op, score: int) -> int:
    via, space = op.attr("via"), op.space
    wide = builder.op("cast", score, dtype="float32") if op.dtype in ("bfloat16", "float16") else score
    largest = builder.op("reduce", builder.op("stop_gradient", wide), via=via, op="max")
    weight = builder.op("exp", builder.op("sub", wide, builder.read_back(largest, via, space)))
    total = builder.op("reduce", weight, via=via, op="sum")
    dtype, coarse = builder.ops[total].dtype, builder.ops[total].space
    none = builder.op("eq", total, builder.const(0.0, dtype, coarse))
    share = builder.op("div", weight, builder.read_back(builder.op("add", total, none), via, space))
    return share if op.dtype == dtype else builder.op("cast", share, dtype=op.dtype)


def _shared_by_ties(builder: Builder, x: int, extremum: int, total: Callable[[int], int]) -> int:
    """The extremum of rows, of which each that equals it has an equal share; `extremum` is read at the rows."""
    op = builder.ops[x]
    equal = builder.op("eq", builder.op("stop_gradient", x), extremum)
    rows = builder.op("select", equal, x, builder.const(0.0, op.dtype, op.space))
    found, count = total(rows), total(equal)
    one = builder.const(1.0, op.dtype, builder.ops[count].space)
    return builder.op("div", found, builder.op("max", count, one))


def _on_nodes(program: OpProgram) -> OpProgram:
    """Row-wise work of edges that depends on one end alone moves to the nodes of that end.

    What is read across devices is then a node value, and the owner computes it once. What may be infinite is 1 at nodes
    that no edge reads: no gradient times infinity is NaN.
    """
    ends: dict[int, tuple[str, int]] = {}  # of an edge value: "src" or "dst" and the node value
    shared: dict[int, int] = {}  # of an edge value that is equal on all edges: the shared value

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.space != Space.EDGE:
            return None
        if op.name == "gather" and op.attr("via") in ("src", "dst"):
            ends[index] = op.attr("via"), args[0]
            return None
        if op.name == "gather" and op.attr("via") == "all":
            shared[index] = args[0]
            return None
        if op.name == "const":
            shared[index] = builder.const(op.attr("value"), op.dtype)
            return None
        if not (op.name in ROWWISE or (op.name == "linear" and op.attr("via") == "all")) or op.name in PARTIAL:
            return None
        edge_args = [a for a in op.args if program.ops[a].space == Space.EDGE]
        found = {ends[a][0] for a in edge_args if a in ends}
        if len(found) != 1 or any(a not in ends and a not in shared for a in edge_args):
            return None
        (end,) = found
        unread, moved = UnreadRows(builder), []
        for a, now in zip(op.args, args, strict=True):
            if a in ends:
                node = ends[a][1]
                moved.append(unread.one(node, end) if unread.may_be_infinite(node) else node)
            elif program.ops[a].space == Space.EDGE:
                moved.append(builder.lift(shared[a], Space.NODE))
            else:
                moved.append(now)
        made = builder.op(op.name, *moved, **dict(op.attrs))
        ends[index] = end, made
        return builder.op("gather", made, via=end)

    return rebuild(program, visit)


def is_crossing_reduction(program: OpProgram, op: Op) -> bool:
    """Whether the value is a reduction of rows that lie on several devices."""
    if op.name not in ("reduce", "place", "count") or op.attr("via") not in CROSSING:
        return False
    if op.name == "count":
        return VIAS[op.attr("via")].fine not in REPLICATED and op.attr("space") not in REPLICATED
    return program.ops[op.args[0]].space not in REPLICATED
