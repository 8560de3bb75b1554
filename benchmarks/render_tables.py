"""Makes README's tables from the JSON under benchmarks/results.

    python benchmarks/render_tables.py            # writes them between their markers
    python benchmarks/render_tables.py --check    # exit status 1 where README differs from the JSON

A table stands between `<!-- NAME: made by ... -->` and `<!-- end NAME -->`. `accuracy` comes from the files
accuracy_*.json, each of which is the results.json of one run of examples/entity_classification.py; `performance`,
`host_gather` and `offload` from what benchmarks/rgnn.py, host_gather.py and offload.py wrote on an H200.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rgnn_report

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"

PERFORMANCE = "rgnn_h200_float32_tf32_w64_h1.json"
HOST_GATHER = "host_gather_h200.json"
OFFLOAD = "offload_h200.json"

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


def performance_table(results: Path) -> str:
    """One row for each graph and model."""
    return rgnn_report.markdown(json.loads((results / PERFORMANCE).read_text(encoding="utf-8")))


def host_gather_table(results: Path) -> str:
    """One row for each table size and number of ids."""
    lines = [
        "| table, GiB | rows of 512 bytes | GB/s | of the copy engine | ids as they come | torch, 16 threads | numpy |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    path = results / HOST_GATHER
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"sections": {}}
    for cell in report["sections"].get("sizes", []):
        engine = report["copy_engine_of"]["sizes"]
        rates = [f"{cell[name]:.1f}" if cell.get(name) else "-" for name in ("given", "torch", "numpy")]
        cells = [f"{cell['gib']:g}", f"{cell['ids']:,}", f"{cell['auto']:.1f}", f"{cell['auto'] / engine:.2f}", *rates]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
                memory = row["temp_gib"] + row.get("ring_gib", 0)
                when = " (earlier run)" if "note" in row else ""
                lines.append(f"| {title} | {words}{when} | {row['ms']:.1f} | {memory:.2f} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "accuracy": accuracy_table,
    "performance": performance_table,
    "host_gather": host_gather_table,
    "offload": offload_table,
}


def render(text: str, results: Path) -> str:
    """The text with every table made anew.

    Raises:
        ValueError: a table's markers are not in the text.
    """
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name}:[^\n]*-->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"no markers <!-- {name}: ... --> and <!-- end {name} --> in the text")
        table = f"\n{make(results)}\n\n"
        text = pattern.sub(lambda match, table=table: match[1] + table + match[2], text)
    return text


def _place(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order)), name


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Makes README's tables from the JSON under benchmarks/results.")
    p.add_argument("--check", action="store_true", help="write nothing; exit status 1 where README is out of date")
    args: Any = p.parse_args(argv)
    old = README.read_text(encoding="utf-8")
    new = render(old, RESULTS)
    if args.check:
        if new != old:
            print("README.md is out of date: run python benchmarks/render_tables.py", file=sys.stderr)
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
