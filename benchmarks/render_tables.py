"""Makes the tables of the pages, and README's chart, from the JSON under benchmarks/results.

    python -m benchmarks.render_tables            # writes them
    python -m benchmarks.render_tables --check    # exit status 1 where a page or the chart differs from the JSON

A table stands between `<!-- NAME: made by ... -->` and `<!-- end NAME -->` on any of the pages (`PAGES`). To move a
table to another page, move its two markers. `accuracy` comes from the files accuracy_*.json, each of which is the
results.json of one run of examples/entity_classification.py. `means`, `performance`, `host_gather` and `offload` come
from what benchmarks/rgnn.py, host_gather.py and offload.py wrote on an H200.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rgnn_report, speed_chart

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "docs" / "figures" / "rgnn_training_time.svg"
RESULTS = ROOT / "benchmarks" / "results"

PERFORMANCE = "rgnn_h200_float32_tf32_w64_h1.json"
HOST_GATHER = "host_gather_h200.json"
OFFLOAD = "offload_h200.json"
MINI_BATCH = "mini_batch_pipeline_h200.json"
MINI_BATCH_PEER = "mini_batch_peer_h200.json"
SEVERAL_GPUS = "several_gpus_h100x2.json"

_GPT = {
    "saved": "everything saved",
    "remat": "`jax.checkpoint` around each block",
    "inputs": "`offload(jax.checkpoint(block))`",
    "names": "`offload`, named tensors",
}
_LAYERS = {
    "inputs saved": "`jax.checkpoint` around each layer",
    "offload, host, ring of auto": "`offload(jax.checkpoint(layer))`",
    "JAX's own offload": "JAX's `save_and_offload_only_these_names`",
}

_DATASETS = {"stdlib": "code graph of the standard library", "aifb": "AIFB", "mutag": "MUTAG", "bgs": "BGS", "am": "AM"}
_MODELS = {"rgcn": "R-GCN", "rgat": "RGAT", "hgt": "HGT"}


def accuracy_table(results: Path) -> str:
    """One row for each data set, model and machine."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("accuracy_*.json"))]
    order = list(_DATASETS), list(_MODELS)
    runs.sort(key=lambda r: (_place(order[0], r["dataset"]), _place(order[1], r["model"]), r["machine"]["kind"]))
    lines = [
        "| data set | model | test accuracy, % (seeds) | no edges | most frequent class | epoch, ms | job, s | on |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        test, baselines = run["accuracy"]["test"], run["baselines"]
        no_edges = f"{100 * baselines['no_edges']['mean']:.1f}" if baselines["no_edges"] else "-"
        versions, machine = run["versions"], run["machine"]
        cells = [
            _DATASETS.get(run["dataset"], run["dataset"]),
            _MODELS.get(run["model"], run["model"]),
            f"{100 * test['mean']:.1f} ± {100 * test['std']:.1f} ({len(test['runs'])})",
            no_edges,
            f"{100 * baselines['majority']:.1f}",
            f"{run['time']['epoch_ms']:.3g}",
            f"{run['time']['total_s']:.0f}",
            f"{machine['kind']}, {machine['backend']}, jax {versions['jax']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sampled_table(results: Path) -> str:
    """Mini-batches beside the full batch: the results.json of `dejax-train --sampled`, as sampled_*.json."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("sampled_*.json"))]
    order = list(_DATASETS), list(_MODELS)
    runs.sort(key=lambda r: (_place(order[0], r["dataset"]), _place(order[1], r["model"]), r["settings"]["full_batch"]))
    lines = [
        "| data set | model | a step sees | epochs, steps of each | test accuracy, % (seeds) | step, ms | on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        settings, test, machine = run["settings"], run["accuracy"]["test"], run["machine"]
        fan_outs = ", ".join(map(str, settings["fan_outs"]))
        seeds = f"{settings['batch_size']:,} seeds, fan-out {fan_outs}"
        steps = 1 if settings["full_batch"] else -(-run["graph"]["split_sizes"]["train"] // settings["batch_size"])
        cells = [
            _DATASETS.get(run["dataset"], run["dataset"]),
            _MODELS.get(run["model"], run["model"]),
            "the whole graph" if settings["full_batch"] else seeds,
            f"{settings['epochs']}, {steps}",
            f"{100 * test['mean']:.1f} ± {100 * test['std']:.1f} ({len(test['runs'])})",
            f"{run['time']['step_ms']:.3g}",
            f"{machine['kind']}, {machine['backend']}, jax {run['versions']['jax']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def means_table(results: Path) -> str:
    """README's table: each part against its peers, as geometric means over the cells of the full tables."""
    report = json.loads((results / PERFORMANCE).read_text(encoding="utf-8"))
    lines = ["| what | against | result | over |", "| --- | --- | --- | --- |"]
    peers = {"device": "fastest other on the GPU", "hector": "Hector"}
    for model, title in rgnn_report.MODELS.items():
        cells = [c for c in rgnn_report.cells(report, rgnn_report.BASE) if c[1] == model]
        for against, name in peers.items():
            both = rgnn_report.known_ratios(report, rgnn_report.BASE, cells, against)
            means = [f"{rgnn_report.rounded(rgnn_report.geometric_mean(values), 2)}x" for values in both]
            if known := min(map(len, both)):
                lines.append(f"| {title} layer, forward / training | {name} | {' / '.join(means)} | {known} graphs |")
    sizes = _host_gather_sizes(results)
    for peer, name in (("torch", "PyTorch on 16 CPU threads, and a copy"), ("numpy", "`numpy.take`, and a copy")):
        ratios = [cell["auto"] / cell[peer] for cell in sizes if cell.get(peer)]
        if ratios:
            mean = rgnn_report.rounded(rgnn_report.geometric_mean(ratios), 2)
            lines.append(f"| rows of a table in host memory | {name} | {mean}x | {len(ratios)} sizes |")
    lines += _mini_batch_rows(results)
    saved, named = (_offload_row(results, "gpt", name) for name in ("saved", "names"))
    memory = f"{_gib(named):.1f} instead of {_gib(saved):.1f} GiB, {named['ms']:.0f} instead of {saved['ms']:.0f} ms"
    lines.append(f"| activations of 6 GPT blocks, width 8,192 | everything saved | {memory} | |")
    for path in results.glob("accuracy_aifb_rgcn.json"):
        test = json.loads(path.read_text(encoding="utf-8"))["accuracy"]["test"]
        accuracy = f"{100 * test['mean']:.1f} %, the paper 95.83 % | {len(test['runs'])} seeds"
        lines.append(f"| test accuracy of R-GCN on AIFB | its paper (arXiv 1703.06103) | {accuracy} |")
    return "\n".join(lines)


def _mini_batch_rows(results: Path) -> list[str]:
    """Steps on mini-batches: against a pipeline of CPU threads, MLPerf's R-GAT, and two GPUs against one."""
    paths = [results / name for name in (MINI_BATCH, MINI_BATCH_PEER, SEVERAL_GPUS)]
    if not all(path.exists() for path in paths):
        return []
    own, peers, several = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    pipelined = {"section": "steps", "way": "pipelined"}.items()
    steps = [row for row in own["results"] if pipelined <= row.items() and row["case"] == "mag"]
    theirs = next(row for row in peers["results"] if row["peer"].endswith("rgat"))
    igb = [run["results"] for run in own["runs"] if run["results"][0]["case"] == "igb"][-1]
    (newest,) = (row for row in igb if pipelined <= row.items())
    rows = [row for run in several["runs"] for row in run.get("mini_batch", []) if row["shape"] == "igb"]
    two = [row["times_one"] for row in rows if row["devices"] == 2 and row["features"] == "host"]
    millions = f"{igb[0]['nodes'] / 1e6:,.0f} million nodes"
    return [
        "| mini-batch step of R-GAT, ogbn-mag's counts | PyTorch Geometric fed by 16 CPU threads | "
        f"{steps[-1]['wall_ms']:.1f} instead of {theirs['step_ms']:.1f} ms | |",
        f"| MLPerf's R-GAT, mini-batches, IGB's shape, {millions} | a GPU of MLPerf v5.1, "
        f"which runs all of IGB on eight | {newest['seeds_per_s']:,.0f} seeds/s, theirs 27,700 | |",
        f"| the same with a hundredth of IGB, two H100, features in host memory | one H100 | {two[-1]:.2f}x | |",
    ]


def performance_table(results: Path) -> str:
    """One row for each graph and model."""
    return rgnn_report.markdown(json.loads((results / PERFORMANCE).read_text(encoding="utf-8")))


def host_gather_table(results: Path) -> str:
    """One row for each table size and number of ids."""
    lines = [
        "| table, GiB | rows of 512 bytes | GB/s | of the copy engine | ids as they come | torch, 16 threads | numpy |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in _host_gather_sizes(results):
        rates = [f"{cell[name]:.1f}" if cell.get(name) else "-" for name in ("given", "torch", "numpy")]
        share = f"{cell['auto'] / cell['engine']:.2f}"
        cells = [f"{cell['gib']:g}", f"{cell['ids']:,}", f"{cell['auto']:.1f}", share, *rates]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _host_gather_sizes(results: Path) -> list[dict[str, Any]]:
    """The section `sizes`, with the copy engine's rate in each cell; empty where there is no file."""
    path = results / HOST_GATHER
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    return [cell | {"engine": report["copy_engine_of"]["sizes"]} for cell in report["sections"].get("sizes", [])]


def offload_table(results: Path) -> str:
    """One row for each way to train that offload was measured against."""
    cases = json.loads((results / OFFLOAD).read_text(encoding="utf-8"))["cases"]
    lines = ["| program | how | step, ms | activation memory, GiB |", "| --- | --- | --- | --- |"]
    for case, title, names in (
        ("gpt", "6 GPT blocks, width 8,192", _GPT),
        ("layers24", "24 layers, width 4,096", _LAYERS),
        ("layers12", "12 layers, width 8,192", _LAYERS),
    ):
        rows = {row["name"]: row for row in cases[case]["rows"]}
        for name, words in names.items():
            if name in rows and "error" not in rows[name]:
                row = rows[name]
                when = " (earlier run)" if "note" in row else ""
                lines.append(f"| {title} | {words}{when} | {row['ms']:.1f} | {_gib(row):.2f} |")
    return "\n".join(lines)


def _offload_row(results: Path, case: str, name: str) -> dict[str, Any]:
    rows = json.loads((results / OFFLOAD).read_text(encoding="utf-8"))["cases"][case]["rows"]
    return next(row for row in rows if row["name"] == name)


def _gib(row: dict[str, Any]) -> float:
    """Activation memory on the device, with the ring."""
    return float(row["temp_gib"] + row.get("ring_gib", 0))


TABLES: dict[str, Callable[[Path], str]] = {
    "means": means_table,
    "accuracy": accuracy_table,
    "sampled": sampled_table,
    "performance": performance_table,
    "host_gather": host_gather_table,
    "offload": offload_table,
}


def pages() -> dict[Path, str]:
    """Every page that may have tables, with its text."""
    paths = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def render(text: str, results: Path) -> str:
    """The text of a page with each of its tables made anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name}:[^\n]*-->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if pattern.search(text):
            table = f"\n{make(results)}\n\n"
            text = pattern.sub(lambda match, table=table: match[1] + table + match[2], text)
    return text


def rendered(results: Path) -> dict[Path, tuple[str, str]]:
    """Each page and the chart: what the file has, and what it must have.

    Raises:
        ValueError: no page, or more than one, has the markers of a table.
    """
    found = pages()
    for name in TABLES:
        markers = f"<!-- {name}:", f"<!-- end {name} -->"
        places = [path.name for path, text in found.items() if all(marker in text for marker in markers)]
        if len(places) != 1:
            raise ValueError(f"the markers of table {name!r} must be on one page, got {places or 'none'}")
    both = {path: (text, render(text, results)) for path, text in found.items()}
    report = json.loads((results / PERFORMANCE).read_text(encoding="utf-8"))
    both[CHART] = CHART.read_text(encoding="utf-8") if CHART.exists() else "", speed_chart.svg(report)
    return both


def _place(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order)), name


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Makes the pages' tables and README's chart from benchmarks/results.")
    p.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is out of date")
    args: Any = p.parse_args(argv)
    stale = {path: new for path, (old, new) in rendered(RESULTS).items() if new != old}
    for path, text in stale.items():
        if args.check:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m benchmarks.render_tables", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
