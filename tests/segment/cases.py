"""The cases of the contract: every operator, dtype and order, and shapes that have gone wrong elsewhere."""

from __future__ import annotations

import dataclasses

from tests.segment.references import FLOATS, INTEGERS, ORDERS, Case

REDUCTIONS = {
    f"{kind}, {dtype}": (kind, Case(dtype=dtype))
    for kind in ("sum", "mean", "max", "min")
    for dtype in (*FLOATS, *INTEGERS)
}
BOOLS = {f"{kind}, bool": (kind, Case(dtype="bool")) for kind in ("max", "min", "mean")}
NORMALIZED = {
    f"{kind}, {dtype}": (kind, Case(dtype=dtype)) for kind in ("softmax", "logsumexp") for dtype in (*FLOATS, "int32")
}
SHAPES = {
    "no entries": Case(0, 5),
    "no segments": Case(70, 0),
    "neither": Case(0, 0),
    "width 0": Case(70, 5, (2, 0)),
    "no features": Case(70, 5, ()),
    "three axes": Case(70, 5, (2, 1, 3)),
    "one segment": Case(300, 1, (2,)),
    "all outside": Case(70, 5, outside=1.0),
    "one long segment": Case(700, 9, (3,), skew=0.8),
    "a long segment of all": Case(500, 3, (2,), skew=1.0, outside=0.0),
    "more segments than entries": Case(20, 300, (2,)),
    "a width over two blocks": Case(90, 4, (600,)),
    "a width of many blocks of 64": Case(90, 4, (130,), dtype="bfloat16"),
    "strange scales": Case(200, 5, (2,), spread=8.0),
    "uint8 ids": Case(ids="uint8"),
    "int8 ids and more segments": Case(70, 300, ids="int8", outside=0.0),
    "uint32 ids": Case(ids="uint32"),
    "int64 ids": Case(ids="int64"),
    "uint64 ids": Case(ids="uint64"),
}


def shaped() -> dict[str, tuple[str, Case]]:
    """Shapes in each order, sums and maxima."""
    found = {}
    for name, case in SHAPES.items():
        for number, order in enumerate(ORDERS):
            for kind in ("sum", "max"):
                if kind == "max" and number % 2:
                    continue
                found[f"{kind}, {name}, {order}"] = (kind, dataclasses.replace(case, order=order))
    return found


CASES = REDUCTIONS | BOOLS | NORMALIZED | shaped()
# Kernels compile for about a second. These are what test_contract.py leaves; the other cases are slow in kernels.
KERNELS = {
    "max, int64",
    "max, all outside, unsorted",
    "sum, no entries, unsorted",
    "sum, no segments, unsorted",
    "max, neither, plan",
    "sum, width 0, unsorted",
    "sum, a width over two blocks, unsorted",
    "sum, strange scales, unsorted",
    "sum, strange scales, plan",
    *(f"sum, {dtype} ids, unsorted" for dtype in ("int64", "uint8", "uint32", "uint64")),
}
# XLA's cases that are not slow: each operator and dtype, and each shape once.
XLA = {*REDUCTIONS, *BOOLS, *NORMALIZED, *(f"sum, {name}, {ORDERS[i % 4]}" for i, name in enumerate(SHAPES))}
