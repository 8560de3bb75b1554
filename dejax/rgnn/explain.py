"""`Program.explain`: every stage of the compilation as text, and the data flow before and after fusion as SVG."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import TextIO

from dejax.rgnn.cost import CostModel, training_models
from dejax.rgnn.execute import Task
from dejax.rgnn.ir.inter import Op, Program, Space, format_op
from dejax.rgnn.ir.intra import Fallback, Kernels, Traversal
from dejax.rgnn.passes import differentiated, lower_to_kernels, optimise


def explain(task: Task, *, file: TextIO | None = None, svg: str | None = None) -> None:
    """Prints the stages of a task, forward and backward; see `Program.explain`."""
    out = file or sys.stdout
    program, counts, disable = task.program, task.counts, task.disable
    previous: list[str] = []

    def watch(stage: str, what: object) -> None:
        text = str(what)
        if previous and previous[-1] == text:
            print(f"== {stage}: no change\n", file=out)
        else:
            print(f"== {stage}\n{text}\n", file=out)
        previous.append(text)

    rows = ", ".join(f"{counts.rows(s):,} {s.replace('_', ' ')}s" for s in Space if s != Space.GRAPH)
    print(f"{program.name} on {rows}\n", file=out)
    watch("traced", program)
    optimised = optimise(program, counts, disable, watch)
    deterministic, half = task.deterministic, task.half
    forward = lower_to_kernels(
        optimised, counts, disable, deterministic=deterministic, half=half, alone=True, watch=watch
    )
    print("== forward, without gradients", file=out)
    precision = task.options.precision or "tf32"
    _print_kernels(CostModel(forward, counts, precision), out)
    drawn = [("traced", _program_nodes(program)), ("forward", _kernel_nodes(forward))]
    wrt = tuple(
        program.ops[i].attr("position") for i in program.inputs if program.ops[i].dtype.startswith(("float", "bfloat"))
    )
    if wrt and "backward" not in disable:
        print("== training: gradients of all floating-point inputs\n", file=out)
        halves = differentiated(optimised, wrt, counts, disable, watch, exact=task.exact)
        saved = tuple(range(halves.num_outputs, len(halves.forward.outputs)))
        first, second = (
            lower_to_kernels(part, counts, disable, deterministic=deterministic, half=half, packed=packed)
            for part, packed in ((halves.forward, saved), (halves.backward, ()))
        )
        models = training_models(halves, first, second, counts, precision)
        for title, model in zip(("forward, with gradients", "backward"), models, strict=True):
            print(f"== {title}", file=out)
            _print_kernels(model, out)
            drawn.append((title, _kernel_nodes(model.kernels)))
        kept = halves.forward.outputs[halves.num_outputs :]
        kept_bytes = sum(counts.rows(halves.forward.ops[v].space) * halves.forward.ops[v].row_bytes for v in kept)
        print(f"kept for backward: {len(kept)} values, {_bytes(kept_bytes)}", file=out)
    if svg is not None:
        Path(svg).write_text(draw(drawn), encoding="utf-8")


def _print_kernels(model: CostModel, out: TextIO) -> None:
    print(model.kernels, file=out)
    header = f"{'kernel':<8}{'template':<12}{'bytes':>12}{'FLOPs':>12}{'predicted':>12}"
    print(f"\n{header}", file=out)
    costs = model.costs()
    for number, (instance, c) in enumerate(zip(model.kernels.instances, costs, strict=True)):
        name = type(instance).__name__.lower() if not isinstance(instance, Fallback) else "xla"
        print(
            f"[{number}]".ljust(8) + f"{name:<12}{_bytes(c.bytes):>12}{_count(c.flops):>12}{c.seconds * 1e6:>9.1f} us",
            file=out,
        )
    total = sum(c.seconds for c in costs)
    moved = sum(c.bytes for c in costs)
    print(
        f"{'total':<20}{_bytes(moved):>12}{_count(sum(c.flops for c in costs)):>12}{total * 1e6:>9.1f} us\n", file=out
    )


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def _count(n: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000 or unit == "T":
            return f"{n:.0f}{unit}" if not unit else f"{n:.1f}{unit}"
        n /= 1000
    raise AssertionError


# ---------------------------------------------------------------------------------------------------------------------
# The drawing: one panel a stage, layers from top to bottom, a box for each operator or kernel.
# ---------------------------------------------------------------------------------------------------------------------

_COLOURS = {
    "input": "#e8eaf0",
    "gemm": "#f6d7b0",
    "outer": "#f3c6a0",
    "traversal": "#bfe0c5",
    "xla": "#f2f2f2",
    "output": "#cfd8f5",
}
_BOX_W, _BOX_H, _GAP_X, _GAP_Y, _MARGIN = 240, 34, 16, 34, 28

Node = tuple[str, str, tuple[str, ...], str]  # key, label, keys it reads, kind


def _program_nodes(program: Program) -> list[Node]:
    nodes: list[Node] = []
    for i, op in enumerate(program.ops):
        kind = (
            "input" if op.name == "input" else "gemm" if op.name == "linear" else "traversal" if _moves(op) else "xla"
        )
        nodes.append((f"v{i}", f"{_label(i, op)}|{op.space}{list(op.shape)}", tuple(f"v{a}" for a in op.args), kind))
    nodes += [(f"out{o}", f"output|%{o}", (f"v{o}",), "output") for o in program.outputs]
    return nodes


def _moves(op: Op) -> bool:
    return op.name in ("gather", "reduce", "softmax")


def _label(i: int, op: Op) -> str:
    text = format_op(i, op)
    return text if len(text) <= 30 else text[:29] + "…"


def _kernel_nodes(kernels: Kernels) -> list[Node]:
    program = kernels.program
    owner = {i: f"v{i}" for i in program.inputs}
    read = {v for instance in kernels.instances for v in instance.reads}
    nodes: list[Node] = [
        (f"v{i}", f"%{i} {program.ops[i].attr('name')}|{program.ops[i].space}{list(program.ops[i].shape)}", (), "input")
        for i in program.inputs
        if i in read
    ]
    for number, instance in enumerate(kernels.instances):
        kind = "xla" if isinstance(instance, Fallback) else type(instance).__name__.lower()
        what = f"{kind} [{number}]"
        if isinstance(instance, Traversal):
            what += f" over {instance.via}" if instance.via else f" of {instance.space}"
        deps = tuple(dict.fromkeys(owner[v] for v in instance.reads))
        nodes.append((f"k{number}", f"{what}|writes " + " ".join(f"%{v}" for v in instance.writes[:6]), deps, kind))
        owner.update((v, f"k{number}") for v in instance.writes)
    nodes += [(f"out{o}", f"output|%{o}", (owner[o],), "output") for o in program.outputs]
    return nodes


def draw(panels: list[tuple[str, list[Node]]]) -> str:
    """The panels side by side as one SVG document."""
    bodies, x, height = [], 0.0, 0.0
    for title, nodes in panels:
        body, w, h = _panel(title, nodes)
        bodies.append(f'<g transform="translate({x:.0f},0)">{body}</g>')
        x, height = x + w, max(height, h)
    style = "text{font:11px sans-serif;fill:#222}.t{font:bold 15px sans-serif}.s{fill:#666}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x:.0f} {height:.0f}" '
        f'width="{x:.0f}" height="{height:.0f}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>{"".join(bodies)}</svg>'
    )


def _panel(title: str, nodes: list[Node]) -> tuple[str, float, float]:
    layer: dict[str, int] = {}
    for key, _, reads, _ in nodes:
        layer[key] = 1 + max((layer[r] for r in reads), default=-1)
    for key, _, _, kind in nodes:  # an input stands right above its first reader
        if kind == "input":
            layer[key] = max(0, min((layer[k] for k, _, reads, _ in nodes if key in reads), default=1) - 1)
    rows: dict[int, list[Node]] = {}
    for node in nodes:
        rows.setdefault(layer[node[0]], []).append(node)
    widest = max(len(r) for r in rows.values())
    width = _MARGIN * 2 + widest * (_BOX_W + _GAP_X)
    at: dict[str, tuple[float, float]] = {}
    for number, depth in enumerate(sorted(rows)):
        row = rows[depth]
        # Boxes stand near the mean of what they read, so that lines cross less.
        row.sort(key=lambda n: sum(at[r][0] for r in n[2] if r in at) / max(1, sum(r in at for r in n[2])))
        start = (width - len(row) * (_BOX_W + _GAP_X) + _GAP_X) / 2
        for column, node in enumerate(row):
            at[node[0]] = (start + column * (_BOX_W + _GAP_X), _MARGIN * 2 + number * (_BOX_H + _GAP_Y))
    parts = [f'<text class="t" x="{_MARGIN}" y="{_MARGIN}">{escape(title)}</text>']
    for key, _, reads, _ in nodes:
        x2, y2 = at[key][0] + _BOX_W / 2, at[key][1]
        for r in reads:
            x1, y1 = at[r][0] + _BOX_W / 2, at[r][1] + _BOX_H
            mid = (y1 + y2) / 2
            parts.append(
                f'<path d="M{x1:.0f},{y1:.0f}C{x1:.0f},{mid:.0f} {x2:.0f},{mid:.0f} {x2:.0f},{y2:.0f}" '
                'fill="none" stroke="#999"/>'
            )
    for key, label, _, kind in nodes:
        x, y = at[key]
        first, second = label.split("|", 1)
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX_W}" height="{_BOX_H}" rx="5" '
            f'fill="{_COLOURS[kind]}" stroke="#888"/>'
            f'<text x="{x + 7:.0f}" y="{y + 14:.0f}">{escape(first)}</text>'
            f'<text class="s" x="{x + 7:.0f}" y="{y + 27:.0f}">{escape(second)}</text>'
        )
    height = _MARGIN * 3 + len(rows) * (_BOX_H + _GAP_Y)
    return "".join(parts), width, height
