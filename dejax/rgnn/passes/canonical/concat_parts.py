"""The sum of two parts that are padded with zeros, each where the other is not, is their concatenation.

The gradient of a value that is read in parts (`merge_gemms`) is such a sum. A traversal that computes both parts can
then write them into one array.
"""

from __future__ import annotations

from dejax.rgnn.passes.rules import Attr, Match, Pat, Rule, Var, rules


def _are_side_by_side(m: Match) -> bool:
    """Whether the two parts lie side by side: where one part has its elements, the other has zeros."""
    zeros = [m.at(part).attr(side) for part in ("first", "second") for side in ("before", "after")]
    axis = m["axis"]
    return zeros == [0, m.shape("y")[axis], m.shape("x")[axis], 0]


concat_parts = rules(
    Rule(
        Pat(
            "add",
            Pat("pad", Var("x"), axis=Attr("axis"), name="first"),
            Pat("pad", Var("y"), axis=Attr("axis"), name="second"),
        ),
        lambda b, m: b.op("concat", m.new("x"), m.new("y"), axis=m["axis"]),
        where=_are_side_by_side,
    )
)
