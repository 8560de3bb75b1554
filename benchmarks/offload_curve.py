"""Draws docs/figures/offload_plan.svg: the planner's prediction for GPT blocks, and the measurement.

python -m benchmarks offload_curve        # from benchmarks/results/offload_h200.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.provenance import Save
from dejax.offload.plan.curve import Point, draw

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


def run(args: argparse.Namespace, save: Save) -> None:
    del args, save  # it draws what was measured
    cases = json.loads((ROOT / "benchmarks/results/offload_h200.json").read_text(encoding="utf-8"))["cases"]
    plan = cases["gpt_plan"]
    names = set(plan["bytes_of"]) - {"(input)"}
    ways: list[Point] = []
    marked: dict[str, list[Point]] = {}
    for way in plan["ways"]:
        point = (way["peak_gib"] * GIB, 1e-3 * way["ms"])
        ways.append(point)
        saved, offloaded = way["saved"], set(way["offloaded"]) - {"(input)"}
        if offloaded == names:
            marked.setdefault("all names offloaded", []).append(point)
        elif not offloaded and saved == []:
            marked.setdefault("all recomputed", []).append(point)
        elif not offloaded and saved is None:
            marked.setdefault("all kept", []).append(point)
    rows = [plan["saved"], *(r for r in cases["gpt"]["rows"] if r["name"] in ("remat", "inputs", "names"))]
    measured = [(GIB * (row["temp_gib"] + row.get("ring_gib", 0)), 1e-3 * row["ms"]) for row in rows]
    measured.append((GIB * plan["peak_gib"], 1e-3 * plan["ms"]))
    draw(
        ROOT / "docs/figures/offload_plan.svg",
        ways,
        chosen=(GIB * plan["predicted_gib"], 1e-3 * plan["predicted_ms"]),
        budget_bytes=GIB * plan["share"] * plan["saved"]["temp_gib"],
        marked=marked,
        measured=measured,
    )
