"""The recompute-offload-keep curve: throughput against activation memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dejax._optional import new_figure

Point = tuple[float, float]
"""(peak bytes, seconds a step)"""

_GIB = 2**30


def best(ways: Sequence[Point]) -> list[Point]:
    """The ways that no other beats in both memory and time, sorted by memory."""
    found: list[Point] = []
    for way in sorted(ways):
        if not found or way[1] < found[-1][1]:
            found.append(way)
    return found


def draw(
    path: str | Path,
    ways: Sequence[Point],
    *,
    chosen: Point,
    budget_bytes: float,
    marked: Mapping[str, Sequence[Point]],
    measured: Sequence[Point] = (),
) -> None:
    """Draws every way, the best ones as a curve, the chosen one and its budget, some by name, and measured points."""
    figure = new_figure("the plot of a plan", (8.0, 4.0), layout="constrained")
    axes = figure.subplots()

    def points(some: Sequence[Point], style: str, **options: object) -> None:
        axes.plot([peak / _GIB for peak, _ in some], [1 / seconds for _, seconds in some], style, **options)

    points(ways, ".", ms=3, color="0.7", label="a way, predicted")
    points(best(ways), "-", label="the fastest for its memory")
    for (name, some), marker in zip(marked.items(), "vs^oD", strict=False):
        points(some, marker, label=name)
    points([chosen], "*", ms=12, label="the plan's choice")
    if measured:
        points(measured, "x", ms=9, label="measured")
    axes.axvline(budget_bytes / _GIB, color="0.6", lw=0.8, ls=":", label="the budget")
    axes.set_xlabel("activation memory, GiB")
    axes.set_ylabel("steps a second")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * max(1 / seconds for _, seconds in (*ways, chosen, *measured)))
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
