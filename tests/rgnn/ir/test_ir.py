"""The verifiers of both IRs, each rule broken once, and the printed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dejax.rgnn.ir.inter import Builder, IRError, Op, OpProgram, Space, infer, promote, verify
from dejax.rgnn.ir.intra import Accumulator, Fallback, Gemm, Kernels, Operand, Traversal, verify_kernels


def op(space: Space, *shape: int, dtype: str = "float32", name: str = "input") -> Op:
    return Op(name, (), (), space, shape, dtype)


NODE, EDGE, TYPE, GRAPH = op(Space.NODE, 4), op(Space.EDGE, 4), op(Space.EDGE_TYPE, 4, 3), op(Space.GRAPH, 4)
HEADS = op(Space.EDGE, 2, 4)

# (operator, arguments, attributes, pattern of the error)
BROKEN: dict[str, tuple[str, list[Op], dict[str, Any], str]] = {
    "unknown operator": ("convolve", [EDGE], {}, "unknown operator 'convolve'"),
    "two spaces": ("add", [EDGE, NODE], {}, "arguments are in different spaces: edge, node"),
    "two ranks": ("mul", [EDGE, HEADS], {}, r"feature shapes \(4,\) and \(2, 4\) have different ranks"),
    "two widths": ("mul", [EDGE, op(Space.EDGE, 3)], {}, "do not broadcast at axis 0"),
    "unknown map": ("gather", [NODE], {"via": "sideways"}, "unknown map 'sideways'"),
    "gather of a fine value": ("gather", [EDGE], {"via": "src"}, "map src needs a node value, got a edge value"),
    "reduction of a coarse value": (
        "reduce",
        [NODE],
        {"via": "dst", "op": "sum"},
        "map dst needs a edge value, got a node value",
    ),
    "unknown reduction": ("reduce", [EDGE], {"via": "dst", "op": "median"}, "unknown reduction 'median'"),
    "softmax of a coarse value": ("softmax", [NODE], {"via": "dst"}, "map dst needs a edge value"),
    "linear of other rows": (
        "linear",
        [NODE, TYPE],
        {"via": "etype", "spec": "k,kn->n"},
        "linear via etype needs edge rows, got node",
    ),
    "linear with another weight": (
        "linear",
        [EDGE, op(Space.NODE_TYPE, 4, 3)],
        {"via": "etype", "spec": "k,kn->n"},
        "linear via etype needs a edge_type weight, got node_type",
    ),
    "linear via self of two spaces": (
        "linear",
        [EDGE, TYPE],
        {"via": "self", "spec": "k,kn->n"},
        "via self of a edge and a edge_type",
    ),
    "contraction of another rank": (
        "linear",
        [HEADS, TYPE],
        {"via": "etype", "spec": "k,kn->n"},
        r"contraction k,kn->n does not fit feature shapes \(2, 4\) and \(4, 3\)",
    ),
    "contraction of another width": (
        "linear",
        [op(Space.EDGE, 5), TYPE],
        {"via": "etype", "spec": "k,kn->n"},
        r"widths differ: contraction k,kn->n of \(5,\) and \(4, 3\)",
    ),
    "a letter from nowhere": (
        "linear",
        [EDGE, TYPE],
        {"via": "etype", "spec": "k,kn->nz"},
        "contraction k,kn->nz has a letter in its result alone",
    ),
    "outer product of two spaces": (
        "outer",
        [EDGE, NODE],
        {"via": "etype", "spec": "k,n->kn", "dtype": "float32"},
        "arguments are in different spaces",
    ),
    "outer product of a coarse value": (
        "outer",
        [NODE, NODE],
        {"via": "etype", "spec": "k,n->kn", "dtype": "float32"},
        "map etype needs a edge value",
    ),
    "dot of two shapes": ("dot", [EDGE, op(Space.EDGE, 3)], {}, r"dot of feature shapes \(4,\) and \(3,\)"),
    "dot of scalars": ("dot", [op(Space.EDGE), op(Space.EDGE)], {}, r"dot of feature shapes \(\) and \(\)"),
    "sum over no axis": (
        "sum_features",
        [EDGE],
        {"axes": (1,), "keepdims": False},
        r"axes \(1,\) of feature shape \(4,\)",
    ),
    "reshape to another size": ("reshape", [EDGE], {"shape": (5,)}, r"reshape of feature shape \(4,\) to \(5,\)"),
    "transpose of other axes": ("transpose", [HEADS], {"perm": (0, 0)}, r"transpose \(0, 0\) of \(2, 4\)"),
    "broadcast to fewer": ("broadcast", [EDGE], {"shape": (1,)}, r"broadcast of feature shape \(4,\) to \(1,\)"),
    "concat of other shapes": (
        "concat",
        [HEADS, op(Space.EDGE, 3, 4)],
        {"axis": 1},
        r"concat of \(2, 4\), \(3, 4\) along axis 1",
    ),
    "concat of other ranks": ("concat", [HEADS, EDGE], {"axis": 0}, "concat of different ranks"),
    "concat of two spaces": ("concat", [EDGE, NODE], {"axis": 0}, "arguments are in different spaces"),
    "slice past the end": ("slice", [EDGE], {"axis": 0, "start": 2, "stop": 5}, "slice 2:5 of axis 0"),
    "an attribute that the operator does not have": (
        "reduce",
        [EDGE],
        {"via": "dst", "op": "sum", "twice": True},
        "unexpected keyword argument 'twice'",
    ),
    "an attribute that is missing": ("reduce", [EDGE], {"via": "dst"}, "missing 1 required .* 'op'"),
    "an argument too many": ("neg", [EDGE, EDGE], {}, "takes 1 positional argument but 2 were given"),
    "select of two spaces": ("select", [NODE, EDGE, EDGE], {}, "arguments are in different spaces"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_rules_of_level_1(rule: str) -> None:
    name, args, attrs, message = BROKEN[rule]
    with pytest.raises(IRError, match=message):
        infer(name, args, tuple(sorted(attrs.items())))


def valid() -> OpProgram:
    b = Builder("valid")
    x = b.op("input", name="x", position=0, space="node", shape=(4,), dtype="float32")
    w = b.op("input", name="w", position=1, space="edge_type", shape=(4, 3), dtype="float32")
    y = b.op("linear", b.op("gather", x, via="src"), w, spec="k,kn->n", via="etype")
    return b.build([b.op("reduce", y, via="dst", op="sum")])


def changed(program: OpProgram, index: int, **fields: Any) -> OpProgram:
    ops = list(program.ops)
    ops[index] = replace(ops[index], **fields)
    return replace(program, ops=tuple(ops))


STRUCTURE = {
    "an argument from later": (lambda p: changed(p, 2, args=(3,)), r"%2: an argument is not defined before it: \(3,\)"),
    "an argument from nowhere": (lambda p: changed(p, 2, args=(-1,)), r"%2: an argument is not defined before it"),
    "a broken rule": (lambda p: changed(p, 3, args=(0, 1)), r"%3 = linear: linear via etype needs edge rows, got node"),
    "another shape than said": (
        lambda p: changed(p, 3, shape=(5,)),
        r"%3 = linear is typed .*\(5,\).* its arguments give .*\(3,\)",
    ),
    "another dtype than said": (lambda p: changed(p, 4, dtype="bfloat16"), r"%4 = reduce is typed"),
    "another space than said": (lambda p: changed(p, 2, space=Space.NODE), r"%2 = gather is typed"),
    "an output from nowhere": (lambda p: replace(p, outputs=(5,)), "an output is not defined"),
    "two inputs at one position": (
        lambda p: changed(p, 1, attrs=(*(a for a in p.ops[1].attrs if a[0] != "position"), ("position", 0))),
        r"two inputs share a position: \[0, 0\]",
    ),
}


@pytest.mark.parametrize("rule", STRUCTURE)
def test_structure_of_level_1(rule: str) -> None:
    change, message = STRUCTURE[rule]
    assert verify(valid()) == valid()
    with pytest.raises(IRError, match=message):
        verify(change(valid()))


def test_the_builder_checks_at_once() -> None:
    b = Builder("at once")
    x = b.op("input", name="x", position=0, space="node", shape=(4,), dtype="float32")
    with pytest.raises(IRError, match="map dst needs a edge value"):
        b.op("reduce", x, via="dst", op="sum")
    assert len(b.ops) == 1


def test_outputs_made_while_building() -> None:
    b = Builder("lazy")
    x = b.op("input", name="x", position=0, space="node", shape=(4,), dtype="float32")
    program = b.build(b.op("tanh", v) for v in (x, x))
    assert program.outputs == (1, 2)


def test_dtypes_of_mixed_arithmetic() -> None:
    assert promote("float32", "float64") == "float64"
    assert promote("bfloat16", "float32") == "float32"
    assert promote("bfloat16", "float16") == "float32"
    assert promote("int32", "bfloat16") == "bfloat16"
    assert promote("bool", "int32") == promote("int32", "bool") == "int32"


def test_printed_form_of_level_1() -> None:
    assert str(valid()) == "\n".join(
        [
            "valid:",
            "%0 = input<x>                            : node[4] float32",
            "%1 = input<w>                            : edge_type[4, 3] float32",
            "%2 = gather %0 via=src                   : edge[4] float32",
            "%3 = linear %2 %1 spec=k,kn->n via=etype : edge[3] float32",
            "%4 = reduce %3 op=sum via=dst            : node[3] float32",
            "return %4",
        ]
    )


def test_programs_are_keys() -> None:
    assert valid() == valid() and hash(valid()) == hash(valid())
    assert valid() != changed(valid(), 3, shape=(5,))
    # The lines of the user's code are not part of a program's identity.
    assert replace(valid(), lines=("a.py:1",) * 5) == valid()


# --- level 2 ---------------------------------------------------------------------------------------------------------

GEMM = Gemm(3, 3, Operand(2, 0, "gathered", "src"), 1, "k,kn->n", "etype")
LOOP = Traversal("dst", Space.EDGE, (Operand(3, 3, "dense"),), (), (Accumulator("sum", 4, 3),), (), (), (4,))

LEVEL_2: dict[str, tuple[tuple, str]] = {
    "reads before it is written": ((LOOP, GEMM), r"instance 0 \(traversal\) reads %3 before it is written"),
    "writes twice": ((GEMM, GEMM, LOOP), r"instance 1 \(grouped GEMM\) writes %3 again"),
    "an output that nobody writes": ((GEMM,), r"output %4 is written by no instance"),
    "a contraction with no matrix": (
        (replace(GEMM, spec="hk,hk->h"), LOOP),
        "contraction hk,hk->h is not a product",
    ),
    "a body of other entries": (
        (GEMM, replace(LOOP, body=(4,))),
        r"body operator %4 must be a value of edge, got node",
    ),
    "a body that reads what is not loaded": (
        (replace(LOOP, operands=(), body=(3,)),),
        r"body operator %3 reads a value that is neither loaded",
    ),
    "an epilogue of entries": (
        (GEMM, replace(LOOP, epilogue=(3,))),
        r"epilogue operator %3 is not computable from the row",
    ),
}


@pytest.mark.parametrize("rule", LEVEL_2)
def test_rules_of_level_2(rule: str) -> None:
    instances, message = LEVEL_2[rule]
    verify_kernels(Kernels(valid(), (GEMM, LOOP)))
    with pytest.raises(IRError, match=message):
        verify_kernels(Kernels(valid(), instances))


def test_an_epilogue_must_read_available_values() -> None:
    b = Builder("epilogue")
    e = b.op("input", name="e", position=0, space="edge", shape=(), dtype="float32")
    x = b.op("input", name="x", position=1, space="node", shape=(), dtype="float32")
    total = b.op("reduce", e, via="dst", op="sum")
    program = b.build([b.op("add", total, x)])
    loop = Traversal("dst", Space.EDGE, (Operand(e, e, "dense"),), (), (Accumulator("sum", total, e),), (3,), (), (3,))
    with pytest.raises(IRError, match=r"epilogue operator %3 is not computable from the row"):
        verify_kernels(Kernels(program, (loop,)))
    verify_kernels(Kernels(program, (replace(loop, operands=(*loop.operands, Operand(x, x, "row", "dst"))),)))


def test_printed_form_of_level_2() -> None:
    lines = str(Kernels(valid(), (GEMM, LOOP))).splitlines()
    assert lines == [
        "valid, kernels:",
        "  [0] grouped GEMM %3 = gathered(%0 by src) as %2 x %1 by etype, k,kn->n",
        "  [1] traversal over dst",
        "      reads dense(%3)",
        "      sum %4 of %3",
        "      writes %4",
    ]
    assert str(Fallback((2, 3), (0, 1), (2, 3))) == "xla %2 %3"
