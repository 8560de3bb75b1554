"""Checks the compiler's choices, its predictions, and how far its schedules are from tuned ones.

    python -m benchmarks rgnn_plan --graphs aifb,am --models rgcn --out benchmarks/results

For each graph and model it prints the device time of every combination of the passes that choose (reordering,
aggregation order, folding, compact materialization, recomputation) and of the compiler's own choice, and the time and
`explain`'s prediction of each kernel. With `--tune` it also compares the heuristic's schedules with tuned ones.
"""

from __future__ import annotations

import argparse
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device_time import kernels_jax, profile_jax
from benchmarks.peers.case import Settings, make_graph, parameters
from benchmarks.peers.jax_layers import rel_graph
from benchmarks.provenance import Save
from dejax import rgnn
from dejax.rgnn import library
from dejax.rgnn.compiler import execute
from dejax.rgnn.ir.intra import Fallback, print_kernels
from dejax.rgnn.passes.kernels.predicted import training_models

GRAPHS = ("aifb", "mutag", "bgs", "fb15k", "biokg", "am", "mag", "wikikg2")
MODELS = ("rgcn", "rgat", "hgt")
CHOICES = ("reorder", "aggregate", "fold", "compact", "recompute")
CALLS = 3
COMPILERS = 8


def device_ms(call: Any) -> float | None:
    """Median device time of one call; None if it does not run."""
    try:
        jax.block_until_ready(call())
        found = profile_jax(call, CALLS)
    except Exception as error:  # mostly out of memory, by tensors of edges by width
        print(f"    {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None
    return None if found is None else found.span_ms


class Cell:
    """One layer on one graph."""

    def __init__(self, model: str, graph: Any, settings: Settings) -> None:
        made = parameters(model, graph, settings)
        self.params = {key: jnp.asarray(value) for key, value in made.items()}
        self.layer = getattr(library, model)
        self.graph, _ = rel_graph(graph)
        self.x = jax.random.normal(jax.random.key(0), (graph.num_nodes, settings.width))
        self.precision = settings.precision

    def options(self, disable: tuple[str, ...] = ()) -> rgnn.Options:
        return rgnn.Options(precision=self.precision, disable=disable)

    def calls(self, disable: tuple[str, ...] = ()) -> dict[str, Any]:
        return {key: lambda f=f: f(self.graph, self.x, self.params) for key, f in self.jitted(disable).items()}

    def jitted(self, disable: tuple[str, ...] = ()) -> dict[str, Any]:
        options = self.options(disable)

        def forward(graph: Any, x: Any, params: Any) -> Any:
            return self.layer(graph, x, params, options=options)

        def training(graph: Any, x: Any, params: Any) -> Any:
            y, pullback = jax.vjp(lambda x, p: self.layer(graph, x, p, options=options), x, params)
            return y, pullback(jnp.ones_like(y))

        return {"forward": jax.jit(forward), "training": jax.jit(training)}

    def plan_text(self, disable: tuple[str, ...]) -> str:
        """The kernels of both halves as text: equal if a choice makes no difference."""
        task, _, _ = self.layer._prepare(self.graph, self.options(disable), (self.x, self.params), {})
        _, forward, backward = execute.training_tasks(task, execute.differentiable_positions(task))
        parts = (execute.inference_kernels(t) for t in (task, forward, backward))
        return "\n".join(map(print_kernels, parts))

    def combinations(self) -> dict[str, dict[str, float | None]]:
        """Times by disabled passes; `""` is the compiler's own choice. Equal plans run once."""
        chosen = [c for n in range(len(CHOICES) + 1) for c in itertools.combinations(CHOICES, n)]
        texts = {c: self.plan_text(c) for c in chosen}
        unique = {text: c for c, text in reversed(texts.items())}
        with ThreadPoolExecutor(COMPILERS) as pool:  # compiled in parallel, timed one by one
            made = dict(zip(unique, pool.map(self.compiled_calls, unique.values()), strict=True))
        found = {text: {key: device_ms(call) for key, call in calls.items()} for text, calls in made.items()}
        return {"+".join(c): found[text] for c, text in texts.items()}

    def compiled_calls(self, disable: tuple[str, ...]) -> dict[str, Any]:
        arguments = (self.graph, self.x, self.params)
        compiled = {key: f.lower(*arguments).compile() for key, f in self.jitted(disable).items()}
        return {key: lambda f=f: f(*arguments) for key, f in compiled.items()}

    def predictions(self) -> list[dict[str, Any]]:
        """Each kernel instance's predicted and measured time, ms."""
        task, _, _ = self.layer._prepare(self.graph, self.options(), (self.x, self.params), {})
        cut, *tasks = execute.training_tasks(task, execute.differentiable_positions(task))
        forward, backward = (execute.inference_kernels(part) for part in tasks)
        costs = training_models(cut, forward, backward, task.counts, self.precision)
        call = self.calls()["training"]
        jax.block_until_ready(call())
        times = kernels_jax(call, CALLS)
        rows = []
        for kernels, model in zip((forward, backward), costs, strict=True):
            name = kernels.program.name
            for number, (instance, cost) in enumerate(zip(kernels.instances, model.costs(), strict=True)):
                if isinstance(instance, Fallback):
                    continue  # XLA fuses these across instances as it likes
                label = re.sub(r"\W", "_", f"{name}.{number}") + "_"
                measured = sum(ms for name, ms in times.items() if name.startswith(label))
                rows.append(
                    {
                        "kernel": f"{name}.{number}",
                        "template": type(instance).__name__.lower(),
                        "bytes": cost.bytes,
                        "predicted_ms": cost.seconds * 1e3,
                        "measured_ms": measured,
                    }
                )
        return rows


def report(name: str, model: str, cell: dict[str, Any]) -> None:
    combos = cell["combinations"]
    for key in ("forward", "training"):
        ran = {disabled: t[key] for disabled, t in combos.items() if t[key] is not None}
        if "" not in ran:
            print(f"{name:<9}{model:<6}{key}: did not run")
            continue
        best = min(ran, key=lambda disabled: ran[disabled])
        print(
            f"{name:<9}{model:<6}{key:<10}chosen {ran['']:.3f} ms, best of {len(ran)} {ran[best]:.3f} ms "
            f"({'as chosen' if best == '' else 'without ' + best}), ratio {ran[''] / ran[best]:.2f}"
        )
    for row in cell["kernels"]:
        ratio = row["predicted_ms"] / row["measured_ms"] if row["measured_ms"] else float("nan")
        print(
            f"    {row['kernel']:<22}{row['template']:<11}{row['bytes'] / 2**20:>9.1f} MiB  predicted "
            f"{row['predicted_ms']:.4f}  measured {row['measured_ms']:.4f}  ratio {ratio:.2f}"
        )


NEEDS_GPU = True  # device times come from its profiler


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", default=",".join(GRAPHS), help="graphs whose counts to use, with commas")
    parser.add_argument("--models", default=",".join(MODELS), help="layers to measure, with commas")
    parser.add_argument("--width", type=int, default=64, help="features of a node, before and after the layer")
    parser.add_argument("--precision", default="tf32", choices=("f32", "tf32", "bf16"), help="precision of products")
    parser.add_argument("--no-combinations", action="store_true", help="predictions (and tuning) only")
    parser.add_argument("--tune", action="store_true", help="also tune the schedules; the table goes to --out")


def run(args: argparse.Namespace, save: Save) -> None:
    results: dict[str, Any] = {"cells": {}}
    settings = Settings(width=args.width, precision=args.precision)
    for name in args.graphs.split(","):
        graph = make_graph(name)
        for model in args.models.split(","):
            cell = Cell(model, graph, settings)
            found: dict[str, Any] = {
                "combinations": {"": {k: device_ms(c) for k, c in cell.calls().items()}}
                if args.no_combinations
                else cell.combinations(),
                "kernels": cell.predictions(),
            }
            if args.tune:
                tuned = cell.layer.tune(cell.graph, cell.x, cell.params, options=cell.options(), progress=print)
                found["tuned"] = [
                    {
                        "kernel": t.kernel,
                        "key": t.key,
                        "fields": t.fields,
                        "ms": t.seconds * 1e3,
                        "heuristic_ms": t.heuristic_seconds * 1e3,
                    }
                    for t in tuned.kernels
                ]
                found["tuned_total"] = {key: device_ms(call) for key, call in cell.calls().items()}
                print(f"    tuned: {found['tuned_total']}", flush=True)
            report(name, model, found)
            results["cells"][f"{name} {model}"] = found
            save(results)
