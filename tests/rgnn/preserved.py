"""What passes preserve: results and gradients of a program after each pass, by numpy in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core

from dejax import rgnn
from dejax.rgnn import RelGraph
from dejax.rgnn.compiler.execute import counts_of
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import OpProgram, is_float
from dejax.rgnn.passes import AFTER_BACKWARD, INFERENCE, Cut, differentiated, optimise, run_passes
from dejax.rgnn.passes.gradients.backward import differentiate
from tests.rgnn.evaluate import DISTURBANCE, Known, evaluate, to_rows
from tests.rgnn.rounding import DRAWS

Array = np.ndarray
ByPosition = dict[int, Array]
Run = Callable[[OpProgram, ByPosition], list[Array]]


def trace(function: rgnn.OpProgram, graph: RelGraph, *args: Any, **kwargs: Any) -> tuple[OpProgram, ByPosition]:
    """The level-1 program of a function of the front end, and its inputs."""
    program, _, arrays = function.traced(counts_of(graph), args, kwargs)
    inputs = {op.attr("position"): op for op in (program.ops[i] for i in program.inputs)}
    return program, {position: to_rows(graph, op.space, arrays[position]) for position, op in inputs.items()}


def grown(counts: Counts, by: int = 10**5) -> Counts:
    """The counts of a graph with so many times the nodes, edges and pairs: what passes do for large graphs.

    A program that passes made for these counts has the same results on the small graph.
    """
    names = ("nodes", "edges", "source_pairs", "destination_pairs")
    return replace(counts, **{name: by * getattr(counts, name) for name in names})


def float_positions(program: OpProgram) -> tuple[int, ...]:
    """Positions of the inputs that have gradients."""
    inputs = (program.ops[i] for i in program.inputs)
    return tuple(op.attr("position") for op in inputs if is_float(op.dtype))


def cotangents(program: OpProgram, results: Sequence[Array]) -> ByPosition:
    """Cotangents of many signs and sizes for the results, at the positions that `differentiate` gives to them."""
    first = 1 + max((program.ops[i].attr("position") for i in program.inputs), default=-1)
    waves = (np.cos(np.arange(y.size) * 1.7 + n).reshape(y.shape) for n, y in enumerate(results))
    return {first + n: wave for n, wave in enumerate(waves)}


@dataclass(frozen=True)
class Compiled:
    """A program on a graph, and how it is compiled.

    Attributes:
      program: as it was written.
      graph: without padding.
      inputs: by position.
      counts: by which passes decide; by default those of the graph.
      disable: names of passes.
      exact: as in `optimise`.
      tolerance: relative to the largest element of a column, which counts as 0.01 at least.
    """

    program: OpProgram
    graph: RelGraph
    inputs: ByPosition
    counts: Counts = None  # type: ignore[assignment]
    disable: Collection[str] = ()
    exact: bool = True
    tolerance: float = 1e-9

    def __post_init__(self) -> None:
        if self.counts is None:
            object.__setattr__(self, "counts", counts_of(self.graph))

    def for_many_rows(self) -> Compiled:
        """The same program as it is compiled for a large graph; it shares what is wanted."""
        other = replace(self, counts=grown(self.counts))
        shared = ("wrt", "joint", "given", "want", "rounding", "known", "agreed")
        vars(other).update({name: vars(self)[name] for name in shared if name in vars(self)})
        return other

    @cached_property
    def known(self) -> Known:
        """Values of the programs before and after each pass: one differs from the next in a few operators."""
        return Known()

    @cached_property
    def agreed(self) -> set[tuple[int, int]]:
        """Results that were compared: their numbers, and the identities of their arrays."""
        return set()

    def evaluated(self, program: OpProgram, inputs: ByPosition) -> list[Array]:
        return evaluate(program, self.graph, inputs, known=self.known)

    @cached_property
    def wrt(self) -> tuple[int, ...]:
        return float_positions(self.program)

    @cached_property
    def joint(self) -> OpProgram:
        """The derivative of the program as it was written."""
        return differentiate(self.program, self.wrt)

    @cached_property
    def given(self) -> ByPosition:
        """The inputs and the cotangents of the results."""
        return self.inputs | cotangents(self.program, self.evaluated(self.program, self.inputs))

    @cached_property
    def want(self) -> list[Array]:
        """Results and gradients of the program as it was written."""
        return self.evaluated(self.joint, self.given)

    @cached_property
    def rounding(self) -> list[Array]:
        """What rounding does to the program as it was written: the largest errors of disturbed runs, as of float64."""
        runs = [evaluate(self.joint, self.graph, self.given, disturbed=run) for run in range(DRAWS)]
        scale = 2.0**-53 / DISTURBANCE
        return [np.max([np.abs(x - w) for x in found], 0) * scale for *found, w in zip(*runs, self.want, strict=True)]

    def check(self) -> None:
        """Checks results and gradients after each pass, and those of both halves of the program for training."""
        disable, last = frozenset(self.disable), [self.program]

        def after(stage: str, made: OpProgram) -> None:
            if made is not last[0]:
                last[0] = made
                self.compare(stage, self.evaluated(differentiate(made, self.wrt), self.given))

        def after_late(stage: str, made: OpProgram) -> None:
            if not stage.startswith("recompute") and made is not last[0]:
                last[0] = made
                self.compare(f"{stage}, with gradients", self.evaluated(made, self.given))

        def after_alone(stage: str, made: OpProgram) -> None:
            if made is not last[0]:
                last[0] = made
                self.compare(f"{stage}, without gradients", self.evaluated(made, self.inputs))

        program = optimise(self.program, self.counts, disable, after, exact=self.exact)
        run_passes(program, (*INFERENCE, *AFTER_BACKWARD), self.counts, disable, after_alone)
        halves = differentiated(program, self.wrt, self.counts, disable, after_late, exact=self.exact)
        self.compare("cut", [a for part in run_halves(halves, self.evaluated, self.given) for a in part])

    def compare(self, stage: str, got: Sequence[Array]) -> None:
        """Compares results, and gradients where there are any, with those that are wanted."""
        for n, (x, want) in enumerate(zip(got, self.want, strict=False)):
            if (n, id(x)) in self.agreed:  # `known` keeps the array
                continue
            wrong = np.abs(x - want)
            allowed = self.tolerance * np.maximum(_largest_of_columns(np.abs(want)), 0.01)
            if not np.all(wrong <= allowed):
                allowed = allowed + 64 * _largest_of_columns(self.rounding[n])
            results = len(self.program.outputs)
            what = f"result {n}" if n < results else f"the gradient of input {self.wrt[n - results]}"
            assert np.all(wrong <= allowed), (
                f"{what} is wrong after {stage}: by {wrong.max():.1e} of {np.abs(want).max():.1e}"
            )
            self.agreed.add((n, id(x)))

    def check_second_derivatives(self) -> None:
        """Checks gradients of gradients, composed of those of the halves, with those of the program as written."""
        twice = differentiate(self.joint, self.wrt)
        given = self.given | cotangents(self.joint, self.want)
        want = self.evaluated(twice, given)[len(self.want) :]
        disable = frozenset(self.disable)

        def halves(program: OpProgram, wrt: tuple[int, ...]) -> Cut:
            return differentiated(program, wrt, self.counts, disable, exact=self.exact)

        # The gradients are a function of the inputs and of what the forward half saves.
        results = len(self.program.outputs)
        first = halves(optimise(self.program, self.counts, disable, exact=self.exact), self.wrt)
        forward = halves(first.forward, float_positions(first.forward))
        backward = halves(first.backward, float_positions(first.backward))
        of_joint = [given[p] for p in sorted(given)][len(self.given) :]
        of_results, of_gradients = of_joint[:results], of_joint[results:]
        inner = backward_inputs(first, self.evaluated, self.given)
        _, found = run_halves(backward, self.evaluated, inner | dict(_after(first.backward, of_gradients)))
        through = dict(zip(float_positions(first.backward), found, strict=True))
        saved = self.evaluated(first.forward, self.inputs)[results:]
        zeros = {len(first.needed) + n: np.zeros(s.shape) for n, s in enumerate(saved)}
        of_saved = [through.get(p, zero) for p, zero in zeros.items()]
        outer = self.inputs | dict(_after(first.forward, [*of_results, *of_saved]))
        _, found = run_halves(forward, self.evaluated, outer)
        total = dict(zip(float_positions(first.forward), found, strict=True))
        for n, position in enumerate(first.needed):
            if n in through:
                total[position] = total[position] + through[n]
        for position, w in zip(self.wrt, want, strict=True):
            np.testing.assert_allclose(
                total[position], w, rtol=0, atol=10 * self.tolerance * (1 + np.abs(w).max(initial=0))
            )


@contextmanager
def by_numpy(exact: Collection[bool] = (True,)) -> Iterator[list[Compiled]]:
    """Calls of programs outside of `jit` run by numpy in float64, with gradients, in place of XLA or kernels.

    Each call also checks that passes preserve the program, as compiled for its own graph and for a large one, for each
    value of `exact`; and is appended to the list. Inside of `jit` and on graphs with padding, programs run as ever.
    """
    made: list[Compiled] = []

    module = importlib.import_module("dejax.rgnn.compiler.program")
    compiled_run = module.run

    def run(task: Any, graph: RelGraph, inputs: Sequence[Any]) -> Any:
        masked = graph.edge_mask is not None or graph.node_mask is not None
        if masked or not all(map(core.is_concrete, jax.tree.leaves((graph, inputs)))):
            return compiled_run(task, graph, inputs)
        program, counts = task.program, counts_of(graph)
        floats = float_positions(program)
        used = {program.ops[i].attr("position") for i in program.inputs}
        others = {p: np.asarray(inputs[p]) for p in used.difference(floats)}
        dtypes = [program.ops[o].dtype for o in program.outputs]

        def all_inputs(given: Sequence[Any]) -> ByPosition:
            wide = (np.asarray(x).astype(np.float64) for x in given)
            return others | dict(zip(floats, wide, strict=True))

        def forward(given: tuple) -> tuple[list[Any], tuple]:
            inputs = all_inputs(given)
            known = any(c.program is program and c.graph is graph for c in made)
            for each in () if known else exact:
                compiled = Compiled(program, graph, inputs, counts, exact=each)
                compiled.check()
                compiled.for_many_rows().check()
                made.append(compiled)
            return [jnp.asarray(y, t) for y, t in zip(evaluate(program, graph, inputs), dtypes, strict=True)], given

        def backward(given: tuple, of_results: Sequence[Any]) -> tuple[tuple]:
            arrays = all_inputs(given)
            # Results that are integers have no cotangent.
            wide = [
                np.asarray(c, np.float64) if is_float(t) else np.zeros(c.shape)
                for c, t in zip(of_results, dtypes, strict=True)
            ]
            found = evaluate(differentiate(program, floats), graph, arrays | dict(_after(program, wide)))
            gradients = found[len(program.outputs) :]
            return (tuple(jnp.asarray(g, x.dtype) for g, x in zip(gradients, given, strict=True)),)

        called = jax.custom_vjp(lambda given: forward(given)[0])
        called.defvjp(forward, backward)
        return called(tuple(inputs[p] for p in floats))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run", run)
        yield made


def _largest_of_columns(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1]).max(0, initial=0) if x.ndim > 1 else x.max(initial=0)


def _after(program: OpProgram, arrays: Sequence[Array]) -> list[tuple[int, Array]]:
    """Arrays at the positions of the cotangents of a program."""
    return list(zip(cotangents(program, arrays), arrays, strict=True))


def backward_inputs(halves: Cut, run: Run, given: Mapping[int, Array]) -> ByPosition:
    """The inputs of the backward half: inputs of the forward half, what that saves, and cotangents."""
    saved = run(halves.forward, given)[halves.num_outputs :]
    inputs = {halves.forward.ops[i].attr("position") for i in halves.forward.inputs}
    of_results = [a for p, a in sorted(given.items()) if p not in inputs]
    return dict(enumerate([*(given[p] for p in halves.needed), *saved, *of_results]))


def run_halves(halves: Cut, run: Run, given: Mapping[int, Array]) -> tuple[list[Array], list[Array]]:
    """Results and gradients."""
    results = run(halves.forward, given)[: halves.num_outputs]
    return results, run(halves.backward, backward_inputs(halves, run, given))
