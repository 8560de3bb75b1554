"""`Program.explain`: every stage of the compilation as text, and the data flow before and after fusion as SVG."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from dejax._platform import default_device, on_gpu
from dejax.rgnn.compiler.bounds import Bounds, bounds_of
from dejax.rgnn.compiler.execute import (
    CompileTask,
    differentiable_positions,
    inference_kernels,
    optimised,
    run,
    training_cut,
    training_tasks,
    why_no_kernels,
)
from dejax.rgnn.compiler.failures import failures
from dejax.rgnn.cost.model import CostModel
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir.inter import Op, OpProgram, Space, format_op
from dejax.rgnn.ir.intra import Fallback, Kernels, Traversal, left_to_xla
from dejax.rgnn.options import Options
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.kernels.predicted import cost_model, training_models

_NO_COUNTS = Counts(0, 0, 0, 0, 0, 0)  # of a graph: unused and repeated operators are so on any


def explain(
    task: CompileTask,
    graph: RelGraph,
    inputs: Sequence[Any],
    *,
    summary: bool = False,
    file: TextIO | None = None,
    svg: str | None = None,
) -> Explanation:
    """Prints the stages of a task, forward and backward; see `Program.explain`.

    The stages are those of a run: `execute` compiles both. The program is also traced as for a run, which shows for
    which instances no kernel can be made.
    """
    out = file or sys.stdout
    program, counts = task.program, task.counts
    rows = ", ".join(f"{counts.rows(s):,} {s.replace('_', ' ')}s" for s in Space if s != Space.GRAPH)
    print(f"{program.name} on {rows}", file=out)
    why = why_no_kernels(graph, task.options)
    print(_what_runs(why, task.options.interpret), end="\n\n", file=out)
    watch = _Summary(out) if summary else _Stages(out)
    watch("traced", program)
    optimised.__wrapped__(task, watch)
    alone = inference_kernels.__wrapped__(task, watch)
    wrt = differentiable_positions(task)
    trains = bool(wrt) and "backward" not in task.disable
    jax.eval_shape(lambda g, given: _traced(task, g, given, wrt if trains else ()), graph, tuple(inputs))
    ran = lambda kernels: as_run(kernels, task.options, why)  # noqa: E731
    precision = task.options.precision or "tf32"
    print("== forward, without gradients", file=out)
    forward = ran(alone)
    planned = lambda kernels: as_run(kernels, task.options, None)  # noqa: E731
    plan = [("forward, without gradients", cost_model(planned(alone), counts, precision), len(alone.program.outputs))]
    _print_kernels(cost_model(forward, counts, precision), out, timed=why is None)
    drawn = [("traced", _program_nodes(program)), ("forward", _kernel_nodes(forward))]
    if trains:
        print("== training: gradients of all floating-point inputs\n", file=out)
        training_cut.__wrapped__(task, wrt, watch)
        halves, *parts = training_tasks(task, wrt)
        titles = ("forward, with gradients", "backward")
        both = [inference_kernels(part) for part in parts]
        results = (halves.num_outputs, len(halves.backward.outputs))
        models = training_models(halves, planned(both[0]), planned(both[1]), counts, precision)
        plan += zip(titles, models, results, strict=True)
        for title, model in zip(
            titles, training_models(halves, ran(both[0]), ran(both[1]), counts, precision), strict=True
        ):
            print(f"== {title}", file=out)
            _print_kernels(model, out, timed=why is None)
            drawn.append((title, _kernel_nodes(model.kernels)))
        kept = halves.forward.outputs[halves.num_outputs :]
        kept_bytes = sum(counts.rows(halves.forward.ops[v].space) * halves.forward.ops[v].row_bytes for v in kept)
        print(f"kept for backward: {len(kept)} values, {_bytes(kept_bytes)}", file=out)
    if svg is not None:
        Path(svg).write_text(draw(drawn), encoding="utf-8")
    return Explanation(program.name, tuple(plan))


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Program.explain` returns: the kernels of a program on a graph, with their cost models.

    Attributes:
      name: the name of the program.
      models: the title of each part, its cost model and the number of its results: forward, and with gradients forward
        and backward.
    """

    name: str
    models: tuple[tuple[str, CostModel, int], ...]

    def bounds(self) -> Bounds:
        """The bytes of the kernels over the least bytes that the function needs, by kernel, and what costs most.

        The bounds are those of the kernels on an NVIDIA GPU, also where XLA runs the program.
        """
        return bounds_of(self.name, self.models)

    def __repr__(self) -> str:
        return f"<Explanation of {self.name}: .bounds() compares its bytes with the least that it needs>"


def _what_runs(why: str | None, interpret: bool | None) -> str:
    """The backend, and the device of the predictions."""
    device = default_device().device_kind
    if why is not None:
        return f"everything runs in XLA on {device}: {why}"
    interpreted = not on_gpu() if interpret is None else interpret
    runs = f"kernels run {'interpreted ' if interpreted else ''}on {device}"
    return f"{runs}; predicted times are those of an NVIDIA H200"


def _traced(task: CompileTask, graph: RelGraph, inputs: tuple[Any, ...], wrt: tuple[int, ...]) -> Any:
    """Inference and training, traced as for a run, which records the instances that are left to XLA."""
    results = run(task, graph, inputs)
    if not wrt:
        return results

    def part(*given: Any) -> Any:
        every = dict(enumerate(inputs)) | dict(zip(wrt, given, strict=True))
        return run(task, graph, tuple(every[i] for i in range(len(inputs))))

    found, pull = jax.vjp(part, *(inputs[p] for p in wrt))
    ones = tuple(jnp.ones_like(y) if jnp.issubdtype(y.dtype, jnp.floating) else _no_cotangent(y) for y in found)
    return results, pull(ones)


def _no_cotangent(y: Any) -> Any:
    return np.zeros(y.shape, jax.dtypes.float0)


def as_run(kernels: Kernels, options: Options, why: str | None) -> Kernels:
    """The kernels with fallbacks for what XLA runs: everything, for the reason `why`, or instances that failed."""
    failed = failures(kernels, options)
    made = [
        left_to_xla(kernels.program, instance, "" if why is not None else f"no kernel could be made ({failed[number]})")
        if not isinstance(instance, Fallback) and (why is not None or number in failed)
        else instance
        for number, instance in enumerate(kernels.instances)
    ]
    # XLA stores no rows as float16.
    row_scaled = frozenset() if why is not None else kernels.row_scaled
    return replace(
        kernels,
        instances=tuple(made),
        row_scaled=row_scaled,
        read_row_scaled=kernels.read_row_scaled if why is None else frozenset(),
    )


class _Stages:
    """Prints each stage in full."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.previous = out, ""

    def __call__(self, stage: str, what: object) -> None:
        text = str(what)
        print(f"== {stage}: no change\n" if text == self.previous else f"== {stage}\n{text}\n", file=self.out)
        self.previous = text


class _Summary:
    """Prints, for each pass that changes something, the operators that it removes and adds.

    Operators are compared by what they compute and not by number: a new one does not make all after it new. Unused and
    repeated ones are left out, so that a pass that replaces operators shows both sides.
    """

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.before: Counter[str] | None = None
        self.last: OpProgram | None = None

    def __call__(self, stage: str, what: object) -> None:
        assert isinstance(what, OpProgram)
        if what is self.last:
            return
        self.last = what
        live = dce(cse(what, _NO_COUNTS), _NO_COUNTS)
        now = Counter(_described(live))
        if self.before is None or stage == "backward" or stage.startswith("recompute"):
            print(f"== {stage}: {len(live.ops)} operators", file=self.out)
        elif now != self.before:
            print(f"== {stage}", file=self.out)
            for sign, found in (("-", self.before - now), ("+", now - self.before)):
                for text, times in found.items():
                    print(f"  {sign} {text}" + (f" ({times} times)" if times > 1 else ""), file=self.out)
        self.before = now


def _described(program: OpProgram) -> list[str]:
    """Each operator with the names of its arguments, its type, and its line in the user's program."""
    found = []
    for i, op in enumerate(program.ops):
        text = format_op(i, op).split(" = ", 1)[1]
        text = re.sub(r"%(\d+)", lambda m: program.ops[int(m[1])].name, text)
        line = program.lines[i] if program.lines else None
        where = "" if line is None else f"   [{Path(line).name}]"
        found.append(f"{text} : {op.type}{where}")
    return found


def _print_kernels(model: CostModel, out: TextIO, *, timed: bool) -> None:
    """The instances and their figures, with predicted times (of kernels) only where `timed`."""
    print(model.kernels, file=out)
    predicted = lambda seconds: f"{seconds * 1e6:>9.1f} us" if timed else ""  # noqa: E731
    header = f"{'kernel':<8}{'template':<18}{'bytes':>12}{'FLOPs':>12}" + (f"{'predicted':>12}" if timed else "")
    print(f"\n{header}", file=out)
    costs = model.costs()
    for number, (instance, c) in enumerate(zip(model.kernels.instances, costs, strict=True)):
        figures = f"{_bytes(c.bytes):>12}{_count(c.flops):>12}{predicted(c.seconds)}"
        print(f"[{number}]".ljust(8) + f"{instance.template:<18}{figures}", file=out)
    total = [sum(getattr(c, name) for c in costs) for name in ("bytes", "flops", "seconds")]
    print(f"{'total':<26}{_bytes(total[0]):>12}{_count(total[1]):>12}{predicted(total[2])}\n", file=out)


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
    "grouped GEMM": "#f6d7b0",
    "weight gradient": "#f3c6a0",
    "row products": "#f3c6a0",
    "traversal": "#bfe0c5",
    "xla": "#f2f2f2",
    "output": "#cfd8f5",
}
_BOX_W, _BOX_H, _GAP_X, _GAP_Y, _MARGIN = 240, 34, 16, 34, 28

# The colour of an operator is that of the template that computes it.
_KINDS = {"input": "input", "linear": "grouped GEMM"} | dict.fromkeys(("gather", "reduce", "softmax"), "traversal")

Node = tuple[str, str, tuple[str, ...], str]  # key, label, keys it reads, kind


def _program_nodes(program: OpProgram) -> list[Node]:
    nodes: list[Node] = []
    for i, op in enumerate(program.ops):
        kind = _KINDS.get(op.name, "xla")
        nodes.append((f"v{i}", f"{_label(i, op)}|{op.space}{list(op.shape)}", tuple(f"v{a}" for a in op.args), kind))
    nodes += [(f"out{o}", f"output|%{o}", (f"v{o}",), "output") for o in program.outputs]
    return nodes


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
        what = f"{instance.template} [{number}]"
        if isinstance(instance, Traversal):
            what += f" over {instance.via}" if instance.via else f" of {instance.space}"
        deps = tuple(dict.fromkeys(owner[v] for v in instance.reads))
        writes = " ".join(f"%{v}" for v in instance.writes[:6])
        nodes.append((f"k{number}", f"{what}|writes {writes}", deps, instance.template))
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
    """Draws the data flow of one program, each node below those that it reads: its SVG, width and height."""
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
