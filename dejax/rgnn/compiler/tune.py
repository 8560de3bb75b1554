"""`Program.tune`: finds the fastest schedules for a program's kernels on one graph, and stores them for later runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from dejax._platform import default_device, on_gpu
from dejax.pallas.tuning import Measure, Tuned, Tuner, cache_file
from dejax.rgnn.compiler import execute
from dejax.rgnn.compiler.execute import CompileTask
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.lowering.segments import num_rows


@dataclass(frozen=True)
class TuningReport:
    """The schedules that tuning found; printing it shows a table.

    Attributes:
      kernels: one entry for each kernel and shape.
      path: the file that stores them; None where they were not saved.
    """

    kernels: tuple[Tuned, ...]
    path: Path | None

    def __str__(self) -> str:
        lines = [f"{'kernel':<11}{'shape':<46}{'heuristic us':>13}{'tuned us':>10}{'faster':>8}  schedule"]
        for t in self.kernels:
            fields = " ".join(f"{key}={value}" for key, value in t.fields.items())
            ratio = t.heuristic_seconds / t.seconds if t.seconds else 1.0
            times = f"{t.heuristic_seconds * 1e6:>13.1f}{t.seconds * 1e6:>10.1f}{ratio:>7.2f}x"
            lines.append(f"{t.kernel:<11}{t.key:<46}{times}  {fields}")
        if self.path is not None:
            lines.append(f"stored in {self.path}")
        return "\n".join(lines)


def tune(
    task: CompileTask,
    graph: RelGraph,
    inputs: tuple[jax.Array, ...],
    *,
    gradients: bool,
    save: bool,
    measure: Measure | None,
    progress: Callable[[str], None],
) -> TuningReport:
    """Runs each kernel of a task, forward and backward, with every candidate; see `Program.tune`."""
    if graph.is_traced or any(isinstance(x, jax.core.Tracer) for x in inputs):
        raise TypeError("tune must be called with concrete arrays, got traced ones; call it outside jit, grad and vmap")
    if measure is None and not on_gpu():
        raise RuntimeError(f"tune needs a GPU, got the default device {default_device()}")
    tuner = Tuner(measure, progress)
    with tuner.at_work():
        execute.run_kernels(task, graph, inputs)
        if gradients:
            _training(task, graph, inputs)
    path = None
    if save and tuner.found:
        path = cache_file()
        tuner.save(path)
        execute.forget_compiled()
    return TuningReport(tuple(tuner.found.values()), path)


def _training(task: CompileTask, graph: RelGraph, inputs: tuple[jax.Array, ...]) -> None:
    parts, forward, backward = execute.training_tasks(task, execute.differentiable_positions(task))
    saved = range(parts.num_outputs, parts.num_outputs + parts.num_saved)
    shared = execute.encode_shared(task, graph, inputs, ())
    results, row_scaled = execute.run_kernels(forward, graph, inputs, shared)
    program = execute.optimised(task)
    ops = [program.ops[o] for o in program.outputs]
    cotangents = tuple(jnp.ones((num_rows(graph, op.space), *op.shape), op.dtype) for op in ops)
    given = (*(inputs[p] for p in parts.needed), *(results[i] for i in saved), *cotangents)
    given_row_scaled = (*(shared[p] for p in parts.needed), *(row_scaled[i] for i in saved))
    execute.run_kernels(backward, graph, given, given_row_scaled)
