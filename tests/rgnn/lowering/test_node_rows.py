"""Which node values a part of a divided graph needs at its own nodes alone."""

from dejax.rgnn.ir.inter import Builder, OpProgram, Space
from dejax.rgnn.lowering.node_rows import read_elsewhere, summed_at


def program() -> tuple[OpProgram, dict[str, int]]:
    b = Builder("example")
    given = {"space": str(Space.NODE), "shape": (4,), "dtype": "float32"}
    made = {"x": b.op("input", name="x", position=0, **given), "y": b.op("input", name="y", position=1, **given)}
    made["edges"] = b.op("gather", made["x"], via="src")
    made["at_dst"] = b.op("gather", made["y"], via="dst")
    made["sum"] = b.op("reduce", b.op("mul", made["edges"], made["at_dst"]), via="dst", op="sum")
    made["more"] = b.op("add", made["sum"], made["y"])
    made["back"] = b.op("reduce", made["edges"], via="src", op="sum")
    made["mixed"] = b.op("add", made["sum"], made["back"])
    return b.build([made["more"], made["mixed"]]), made


def test_values_that_are_read_elsewhere() -> None:
    some, made = program()
    assert read_elsewhere(some, (0, 1)) == {made["x"]}
    # A result that is needed at all nodes needs what it is made of there, too, but for sums over edges.
    assert read_elsewhere(some, (0,)) == {made[name] for name in ("x", "mixed", "sum", "back")}
    assert read_elsewhere(some) == {made[name] for name in ("x", "y", "more", "mixed", "sum", "back")}


def test_values_that_are_sums_over_incoming_edges() -> None:
    some, made = program()
    assert summed_at(some) == {made[name] for name in ("sum", "more", "mixed")}
