"""Reports of `benchmarks/rgnn.py` from its JSON: tables as text and Markdown, ratios.

Results are `{"graphs": {name: counts and row bounds}, "results": [one for each cell and implementation]}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.tables import columns

KEYS = ("graph", "model", "implementation", "settings")
PHASES = ("forward", "training")
MODELS = {"rgcn": "RGCN", "rgat": "RGAT", "hgt": "HGT"}
PLAIN = ("pyg", "pyg_fast", "jax_ragged", "jax_dense")
"""Implementations in common use: PyTorch Geometric and plain JAX."""
ROUNDED = ("grouped_bf16",)
"""Peers that round float32 operands to bfloat16. They are reported, but count as best only if ours rounds, too."""
BASE = {"width": 64, "heads": 1, "dtype": "float32", "precision": "tf32"}
_HECTOR = Path(__file__).with_name("peers") / "hector.json"

Result = dict[str, Any]
Results = dict[str, Any]


# --- reading results


def settings_name(settings: dict[str, Any]) -> str:
    return f"{settings['dtype']}_{settings['precision']}_w{settings['width']}_h{settings['heads']}"


def select(results: Results, settings: dict[str, Any], **wanted: str) -> list[Result]:
    """Results with these settings and these values of graph, model, implementation, status."""
    return [
        r
        for r in results["results"]
        if r["settings"] == settings and "task" not in r and all(r[key] == value for key, value in wanted.items())
    ]


def cells(results: Results, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """(graph, model) of every cell with a result, in the order of the graphs and of the models."""
    found = {(r["graph"], r["model"]) for r in select(results, settings)}
    return [(g, m) for g in results["graphs"] for m in MODELS if (g, m) in found]


def ours(results: Results, settings: dict[str, Any], graph: str, model: str) -> Result | None:
    found = select(results, settings, graph=graph, model=model, implementation="dejax", status="ok")
    return found[0] if found else None


def milliseconds(result: Result, phase: str, clock: str) -> float:
    """Time of one call by the clock `"device"`, if it was profiled, or `"caller"`.

    Profiling makes launches slower, so the device's time is at most the caller's time of calls in a row.
    """
    measured = result[phase]
    device = measured.get("device")
    return min(device["span_ms"], measured["ms"]) if clock == "device" and device else measured["ms"]


def best_peer(
    results: Results,
    settings: dict[str, Any],
    graph: str,
    model: str,
    phase: str,
    clock: str = "caller",
    among: Sequence[str] | None = None,
) -> tuple[str, float] | None:
    """Name and time of the fastest other implementation; None if none ran."""
    found = [
        (r["implementation"], milliseconds(r, phase, clock))
        for r in select(results, settings, graph=graph, model=model, status="ok")
        if r["implementation"] != "dejax"
        and (among is None or r["implementation"] in among)
        and (r["implementation"] not in ROUNDED or settings["dtype"] == "bfloat16")
    ]
    return min(found, key=lambda pair: pair[1]) if found else None


def hector(graph: str, model: str, phase: str, settings: dict[str, Any]) -> float | None:
    """Hector's time in ms; None if there is no figure."""
    reference = json.loads(_HECTOR.read_text(encoding="utf-8"))
    if settings["width"] != reference["settings"]["width"] or settings["heads"] != reference["settings"]["heads"]:
        return None
    pair = reference["ms"].get(graph, {}).get(model)
    return pair[PHASES.index(phase)] if pair and settings["dtype"] == "float32" else None


def geometric_mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.exp(sum(map(math.log, found)) / len(found)) if found else math.nan


def merge(old: Results, new: Results) -> Results:
    """The new results, and the old results that were not measured again.

    Raises:
        ValueError: a graph of the same name has different counts in both.
    """
    for name in set(old["graphs"]) & set(new["graphs"]):
        counts = [{k: v for k, v in r["graphs"][name].items() if k != "row_bound_ms"} for r in (old, new)]
        if counts[0] != counts[1]:
            raise ValueError(f"graph {name} must have the counts of the earlier results {counts[0]}, got {counts[1]}")
    key = lambda r: json.dumps([r[k] for k in KEYS] + [r.get("task")], sort_keys=True)  # noqa: E731
    measured = {key(r) for r in new["results"]}
    graphs = {name: dict(entry) for name, entry in old["graphs"].items()}
    for name, entry in new["graphs"].items():
        bounds = graphs.get(name, {}).get("row_bound_ms", {}) | entry["row_bound_ms"]
        graphs[name] = {**entry, "row_bound_ms": bounds}
    return {"graphs": graphs, "results": [r for r in old["results"] if key(r) not in measured] + new["results"]}


# --- text


PROGRESS_HEADER = (
    f"{'':<16}{'graph':<9}{'model':<6}{'implementation':<15}"
    f"{'forward ms':>11}{'device':>9}{'launches':>9}{'x bound':>8}"
    f"{'training':>10}{'device':>9}{'launches':>9}{'x fwd':>7}{'MiB':>9}  agreement"
)


def progress(cell: dict[str, Any], result: Result, bound: float) -> str:
    """One line for a new result."""
    head = f"{cell['graph']:<9}{cell['model']:<6}{cell['implementation']:<15}"
    different = {k: v for k, v in cell["settings"].items() if BASE[k] != v}
    tail = "  " + ", ".join(f"{k} {v}" for k, v in different.items()) if different else ""
    if result["status"] != "ok":
        return f"{head}{result['status']}: {result.get('message', '')[:150]}{tail}"
    if cell.get("task") == "compile":
        seconds = ", ".join(f"{result[phase]['first_call_s']:.2f} s" for phase in PHASES)
        return f"{head}first call, cached: {seconds}"
    if cell.get("task") == "build":
        return f"{head}RelGraph of {cell['edges']:,} edges inside jit: {_device(result['build'])} ms"
    forward, training = result["forward"], result["training"]
    spans = [milliseconds(result, phase, "device") for phase in PHASES]
    return (
        f"{head}{forward['ms']:>11.3f}{_device(forward):>9}{_launches(forward):>9}{spans[0] / bound:>8.2f}"
        f"{training['ms']:>10.3f}{_device(training):>9}{_launches(training):>9}{spans[1] / spans[0]:>7.2f}"
        f"{training.get('peak_bytes', math.nan) / 2**20:>9.0f}  {_agreement(result)}{tail}"
    )


def _device(measured: dict[str, Any]) -> str:
    return f"{measured['device']['span_ms']:.3f}" if measured.get("device") else "-"


def _kernels(measured: dict[str, Any]) -> str:
    return f"{measured['device']['kernels_ms']:.3f}" if measured.get("device") else "-"


def _launches(measured: dict[str, Any]) -> str:
    return f"{measured['device']['launches']:.0f}" if measured.get("device") else "-"


def _agreement(result: Result) -> str:
    found = result.get("agreement")
    return f"{found['forward']:.1e} {found['gradients']:.1e}" if found else ""


def text(results: Results, settings: Any) -> str:
    """All tables for these settings, and the times of graphs that are built inside jit."""
    settings = settings if isinstance(settings, dict) else {k: getattr(settings, k) for k in BASE}
    built = [
        f"RelGraph of {r['edges']:,} edges of {r['graph']} inside jit: {_device(r['build'])} ms on the device, "
        f"{r['build']['ms']:.2f} ms for the caller"
        for r in results["results"]
        if r.get("task") == "build" and r["status"] == "ok"
    ]
    parts = [
        "dejax, ms: caller's time; device, first kernel to last; sum of the kernels. Memory is that of training.\n"
        + ours_table(results, settings),
        "Beside the others.\n" + markdown(results, settings),
        sweep_table(results, settings),
        "\n".join(built),
    ]
    return "\n\n".join(part for part in parts if part.strip())


def rounded(value: float | None, digits: int = 3) -> str:
    """The value to `digits` significant digits, never in exponent notation; `-` where there is none."""
    if value is None or math.isnan(value):
        return "-"
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text else text


def ours_table(results: Results, settings: dict[str, Any]) -> str:
    rows = [
        ["graph", "model", "row bound", "forward", "device", "kernels", "launches", "x bound", "training", "device",
         "kernels", "launches", "x fwd", "peak MiB", "x needed", "first s", "cached s", "graph s"]
    ]  # fmt: skip
    for graph, model in cells(results, settings):
        r = ours(results, settings, graph, model)
        bound = results["graphs"][graph]["row_bound_ms"].get(settings_name(settings))
        if r is None:
            status = select(results, settings, graph=graph, model=model, implementation="dejax")
            rows.append([graph, model, rounded(bound), status[0]["status"] if status else "-", *["-"] * 14])
            continue
        f, t = r["forward"], r["training"]
        spans = [milliseconds(r, phase, "device") for phase in PHASES]
        needed = t["peak_bytes"] / t["needed_bytes"] if "needed_bytes" in t else None
        cached = f["first_call_cached_s"] + t["first_call_cached_s"] if "first_call_cached_s" in f else None
        rows.append(
            [graph, model, rounded(bound),
             rounded(f["ms"]), _device(f), _kernels(f), _launches(f), f"{spans[0] / bound:.2f}",
             rounded(t["ms"]), _device(t), _kernels(t), _launches(t), f"{spans[1] / spans[0]:.2f}",
             f"{t['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in t else "-", rounded(needed),
             rounded(f["first_call_s"] + t["first_call_s"]), rounded(cached), rounded(r.get("graph_s"))]
        )  # fmt: skip
    return columns(rows)


def ratio(results: Results, settings: dict[str, Any], cell: tuple[str, str], phase: str, against: str) -> float | None:
    """The time of another implementation over ours.

    Args:
        results: the run.
        settings: the settings of both.
        cell: graph and model.
        phase: `"forward"` or `"training"`.
        against: `"hector"`; `"plain"`, the best of PLAIN; `"all"`, the best of all by the caller's clock; `"device"`,
            the best of all by the device's clock.
    """
    r = ours(results, settings, *cell)
    if r is None:
        return None
    if against == "hector":
        other = hector(*cell, phase, settings)
        return other / milliseconds(r, phase, "device") if other else None
    clock = "device" if against == "device" else "caller"
    found = best_peer(results, settings, *cell, phase, clock, PLAIN if against == "plain" else None)
    return found[1] / milliseconds(r, phase, clock) if found else None


def known_ratios(
    results: Results, settings: dict[str, Any], cells: Sequence[tuple[str, str]], against: str
) -> list[list[float]]:
    """The ratios of these cells, forward and training, without cells that have no ratio."""
    return [[v for c in cells if (v := ratio(results, settings, c, phase, against))] for phase in PHASES]


def sweep(results: Results, base: dict[str, Any]) -> list[tuple[Result, list[float]]]:
    """Our results at other settings, with their times over the row bound relative to the base settings."""
    found = []
    for r in results["results"]:
        if r["implementation"] != "dejax" or r["settings"] == base or r["status"] != "ok" or "task" in r:
            continue
        first = ours(results, base, r["graph"], r["model"])
        bounds = results["graphs"][r["graph"]]["row_bound_ms"]
        names = [settings_name(base), settings_name(r["settings"])]
        if first is not None and all(name in bounds for name in names):
            scale = bounds[names[0]] / bounds[names[1]]
            times = [milliseconds(r, p, "device") / milliseconds(first, p, "device") for p in PHASES]
            found.append((r, [scale * time for time in times]))
    return found


def sweep_table(results: Results, base: dict[str, Any]) -> str:
    rows = [["graph", "model", "width", "heads", "dtype", "precision", "forward", "training"]]
    for r, relative in sweep(results, base):
        s = r["settings"]
        sizes = [str(s[key]) for key in ("width", "heads", "dtype", "precision")]
        rows.append([r["graph"], r["model"], *sizes, *map(rounded, relative)])
    return (
        "Time for each byte of the row bound, relative to the first table.\n" + columns(rows) if len(rows) > 1 else ""
    )


# --- Markdown


def markdown(results: Results, settings: dict[str, Any] = BASE) -> str:
    """One row for each graph and model. A star marks a caller's time, where there is no device time."""
    head = "graph | model | row bound | forward, ms | training, ms | best other, forward | best other, training"
    rows = []

    def pair(cell: tuple[str, str], against: str) -> str:
        return " / ".join(rounded(ratio(results, settings, cell, phase, against), 2) for phase in PHASES)

    def best(cell: tuple[str, str], phase: str) -> str:
        found = best_peer(results, settings, *cell, phase)
        if found:
            return f"{rounded(found[1])} ({found[0]})"
        full = [r["implementation"] for r in select(results, settings, graph=cell[0], model=cell[1], status="OOM")]
        return f"OOM ({', '.join(full)})" if full else "-"

    for cell in cells(results, settings):
        r = ours(results, settings, *cell)
        bound = rounded(results["graphs"][cell[0]]["row_bound_ms"].get(settings_name(settings)))
        star = lambda phase, r=r: "" if r[phase].get("device") else "*"  # noqa: E731
        times = [rounded(milliseconds(r, phase, "device")) + star(phase) if r else "-" for phase in PHASES]
        values = [cell[0], MODELS[cell[1]], bound, *times, *(best(cell, phase) for phase in PHASES)]
        rows.append([*values, pair(cell, "device"), pair(cell, "hector")])
    for model, title in MODELS.items():
        of_model = [c for c in cells(results, settings) if c[1] == model]
        if not of_model:
            continue

        def mean(against: str, of_model: Any = of_model, settings: Any = settings) -> str:
            """Means of forward / training, with the number of graphs if some are missing; empty if all are."""
            both = known_ratios(results, settings, of_model, against)
            if not (known := min(map(len, both))):
                return ""
            of = f" (of {known})" if known < len(of_model) else ""
            return " / ".join(rounded(geometric_mean(values), 2) for values in both) + of

        rows.append(["geometric mean", title, *[""] * 5, mean("device"), mean("hector")])
        if plain := mean("plain"):
            rows.append(["for a caller, over PyG and plain JAX alone", title, *[""] * 5, plain, ""])
        if exact := mean("hector", settings={**settings, "precision": "f32"}):
            rows.append(["with float32 products", title, *[""] * 6, exact])
    return tables.markdown(f"{head} | faster by | Hector over ours", rows)
