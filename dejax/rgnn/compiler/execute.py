"""Runs level-1 programs: compiled once for each shape, with one `custom_vjp` around forward and backward.

Arrays here are in the compiler's form: one row for each element of the value's space (one row for shared values), with
edges in canonical order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from dejax import _compat
from dejax._dtypes import broadcasting
from dejax._platform import on_gpu, platform
from dejax._pytrees import pytree
from dejax.pallas import label
from dejax.pallas.formats.column_powers import column_powers, of_array
from dejax.pallas.formats.encode import to_row_scaled
from dejax.pallas.formats.row_scaled import RowScaled, of_stored
from dejax.pallas.lowering.choice import lowered_by
from dejax.rgnn.compiler.failures import record_failure
from dejax.rgnn.compiler.reverse_only import reverse_only
from dejax.rgnn.compiler.traced import TracedKernel, note
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir.inter import OpProgram, is_float
from dejax.rgnn.ir.intra import Fallback, Kernels
from dejax.rgnn.lowering.node_rows import ALL_ROWS, NodeRows, RowArrays
from dejax.rgnn.lowering.pallas import PallasLowering
from dejax.rgnn.lowering.running import decoded
from dejax.rgnn.lowering.segments import num_rows, segment_sum, valid_rows, where_rows
from dejax.rgnn.lowering.xla import Evaluator
from dejax.rgnn.options import Options
from dejax.rgnn.passes import Cut, Watch, differentiated, lower_to_kernels, optimise, silent
from dejax.rgnn.passes.kernels.storage import linear_in, shared_encodings

Arrays = tuple[jax.Array, ...]


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class EncodedCopy:
    """A row-scaled float16 copy of an input, for instances that may read it rounded; others read the input itself."""

    rows: RowScaled


# By position of the input. `RowScaled` replace the array, which is then not read.
RowScaledInputs = tuple[RowScaled | EncodedCopy | None, ...]
Kept = tuple[RowScaled | None, ...]  # by output


@dataclass(frozen=True, slots=True)
class CompileTask:
    """A program with everything that decides how it is compiled; the static argument of the functions that run it."""

    program: OpProgram
    counts: Counts
    options: Options
    rows: NodeRows = ALL_ROWS
    raw: bool = True  # not yet optimised
    row_scaled_outputs: tuple[int, ...] = ()  # indices of the outputs that may be stored as row-scaled float16
    received: tuple[int, ...] = ()  # positions of inputs with rows of other devices, which get their gradients back
    first: tuple[int, ...] = ()  # indices of outputs that are computed before the others
    platform: str = field(default_factory=platform)  # that it is compiled for

    @property
    def disable(self) -> frozenset[str]:
        return frozenset(self.options.disable)

    @property
    def row_scaled(self) -> bool:
        """Whether products round to 10 bits, so that rows between kernels may be row-scaled float16."""
        return self.options.precision in (None, "tf32")

    @property
    def exact(self) -> bool:
        """Whether differences must keep float32 accuracy, because products are not rounded to fewer bits.

        On the CPU XLA computes float32 products, whatever the precision.
        """
        return self.options.precision == "f32" or why_xla(self.options) is not None


def counts_of(graph: RelGraph) -> Counts:
    typical = graph.typical_source_pairs
    return Counts(
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        source_pairs=graph.num_source_pairs if typical is None else min(typical, graph.num_source_pairs),
        destination_pairs=graph.num_destination_pairs,
        edge_types=graph.num_edge_types,
        node_types=graph.num_node_types,
        typed_sources=graph.edge_type_by_source is not None,
    )


# `watch` is called with each stage. `explain` calls the same functions without their cache.


@lru_cache(maxsize=1024)
def optimised(task: CompileTask, watch: Watch = silent) -> OpProgram:
    return optimise(task.program, task.counts, task.disable, watch, exact=task.exact) if task.raw else task.program


@lru_cache(maxsize=1024)
def inference_kernels(task: CompileTask, watch: Watch = silent) -> Kernels:
    """Kernels of the forward program alone."""
    by_xla = {"scores_on_edges"} if why_xla(task.options) else set()  # XLA writes the rows of edges that it multiplies
    return lower_to_kernels(
        optimised(task),
        task.counts,
        task.disable.union(by_xla),
        row_scaled=task.row_scaled,
        row_scaled_outputs=task.row_scaled_outputs,
        inference=task.raw,
        watch=watch,
    )


@lru_cache(maxsize=1024)
def training_cut(task: CompileTask, wrt: tuple[int, ...], watch: Watch = silent) -> Cut:
    """Forward and backward halves for gradients of the inputs at `wrt`."""
    return differentiated(optimised(task), wrt, task.counts, task.disable, watch, exact=task.exact)


def training_tasks(task: CompileTask, wrt: tuple[int, ...]) -> tuple[Cut, CompileTask, CompileTask]:
    """The cut for gradients of the inputs at `wrt`, and its halves as tasks."""
    parts = training_cut(task, wrt)
    saved = [parts.num_outputs + n for n in range(parts.num_saved) if linear_in_saved(parts, n)]
    rows, of_backward = task.rows.halves(parts, wrt)
    half = replace(task, raw=False, row_scaled_outputs=(), received=(), first=())
    forward = replace(half, program=parts.forward, rows=rows, row_scaled_outputs=(*task.row_scaled_outputs, *saved))
    sent_back = tuple(n for n, position in enumerate(wrt) if position in task.received)
    return parts, forward, replace(half, program=parts.backward, rows=of_backward, first=sent_back)


def linear_in_saved(parts: Cut, number: int) -> bool:
    """Whether gradients are linear in a saved value, so that it may be stored as row-scaled float16."""
    position = len(parts.needed) + number
    inputs = parts.backward.by_position()
    return position not in inputs or linear_in(parts.backward, inputs[position])


def differentiable_positions(task: CompileTask) -> tuple[int, ...]:
    """Positions of the floating-point inputs."""
    ops = [optimised(task).ops[i] for i in optimised(task).inputs]
    return tuple(op.attr("position") for op in ops if is_float(op.dtype))


def _lowered_as_chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a task and more, whose kernels are lowered as the task's options say."""

    @wraps(function)
    def run(task: CompileTask, *args: Any) -> Any:
        with lowered_by(task.options.lowering):
            return function(task, *args)

    return run


@broadcasting
@_lowered_as_chosen
def run_kernels(
    task: CompileTask, graph: RelGraph, inputs: Arrays, row_scaled: RowScaledInputs = ()
) -> tuple[Arrays, Kept]:
    """Executes the instances in order. XLA evaluates an instance whose kernel cannot be made, with a warning.

    Args:
      task: the program.
      graph: the graph.
      inputs: the inputs, by position.
      row_scaled: by position, an input as row-scaled float16, where it is available.

    Returns:
      The outputs, and each output as row-scaled float16, where it was stored so.
    """
    kernels, options = inference_kernels(task), task.options
    program = kernels.program
    env, encoded = _environment(program, inputs, row_scaled)
    rows, pallas = RowArrays(graph, program, task.rows, env), None
    if uses_kernels(graph, options):
        pallas = PallasLowering(kernels, graph, options, encoded, env, rows)
    xla = Evaluator(program, graph, options.precision, segment_sum if pallas is None else pallas.sum_types)
    order, num_first = _instances_for_first(kernels, task.first)
    narrow = frozenset(i for i in program.inputs if isinstance(env[i], RowScaled) or i in encoded)
    for at, number in enumerate(order):
        instance, done = kernels.instances[number], False
        if at == num_first > 0:
            early = {v for other in order[:at] for v in kernels.instances[other].writes}
            _wait_for(early, env, rows)
        name = kernel_name(program.name, number)
        note(name, TracedKernel(kernels, number, counts_of(graph), options, narrow))
        if pallas is not None and not isinstance(instance, Fallback):
            try:
                with label(name), jax.named_scope(name):
                    pallas.run(instance, env)
                done = True
            except jax.errors.JaxRuntimeError:  # from kernels that run immediately, as in `tune`: out of memory
                raise
            except Exception as error:  # XLA can evaluate whatever a template refuses
                record_failure(kernels, options, number, error)
        if not done:
            # XLA recomputes values that a kernel keeps in registers. The values of the failed attempt are dropped.
            with jax.named_scope(name):
                arrays = {i: decoded(a) for i, a in env.items()}
                xla.compute(instance.writes, arrays)
            env.update((w, arrays[w]) for w in instance.writes)
            if pallas is not None:
                if not isinstance(instance, Fallback):  # padding rows that it has read may hold anything
                    env.update(
                        (w, where_rows(valid_rows(graph, program.ops[w].space), env[w])) for w in instance.writes
                    )
                rows.reshaped(instance.writes)
        keep = set(program.outputs).union(*(kernels.instances[other].reads for other in order[at + 1 :]))
        env = {i: a for i, a in env.items() if i in keep or program.ops[i].name == "input"}
    results = tuple(env[o] for o in program.outputs)
    return tuple(map(decoded, results)), tuple(r if isinstance(r, RowScaled) else None for r in results)


def _instances_for_first(kernels: Kernels, first: tuple[int, ...]) -> tuple[list[int], int]:
    """The numbers of all instances, those that the outputs `first` depend on in front; and how many are in front."""
    wanted = {kernels.program.outputs[n] for n in first}
    early: list[int] = []
    for number, instance in reversed([*enumerate(kernels.instances)]):
        if wanted.intersection(instance.writes):
            wanted.update(instance.reads)
            early.insert(0, number)
    return [*early, *(n for n in range(len(kernels.instances)) if n not in early)], len(early)


def _wait_for(values: set[int], env: dict[int, Any], rows: RowArrays) -> None:
    """Lets whatever reads one of the values begin only when all of them exist."""
    some = [{v: arrays[v] for v in sorted(values) if v in arrays} for arrays in (env, rows.of_destinations)]
    in_env, of_destinations = jax.lax.optimization_barrier(some)
    env.update(in_env)
    rows.of_destinations.update(of_destinations)


def _environment(
    program: OpProgram, inputs: Arrays, row_scaled: RowScaledInputs
) -> tuple[dict[int, Any], dict[int, RowScaled]]:
    """The inputs by operator index, and the row-scaled copies of those that have one."""
    env: dict[int, Any] = {}
    encoded: dict[int, RowScaled] = {}
    for i in program.inputs:
        position = program.ops[i].attr("position")
        given = row_scaled[position] if position < len(row_scaled) else None
        env[i] = given if isinstance(given, RowScaled) else inputs[position]
        if isinstance(given, EncodedCopy):
            encoded[i] = given.rows
    return env, encoded


@jax.custom_vjp
def no_gradient_of_padding(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`x`, whose gradient is zero where `mask` is False."""
    return x


def _no_gradient_forward(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, mask


def _no_gradient_backward(mask: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return where_rows(mask, cotangent), None


no_gradient_of_padding.defvjp(_no_gradient_forward, _no_gradient_backward)


def kernel_label(name: str, number: int) -> AbstractContextManager[None]:
    """Names the kernels of an instance in profiles, as in `rgat_backward_3_traverse`."""
    return label(kernel_name(name, number))


def kernel_name(name: str, number: int) -> str:
    """The beginning of the names of an instance's kernels; XLA's operators have it in their path."""
    return re.sub(r"\W", "_", f"{name}.{number}")


def uses_kernels(graph: RelGraph, options: Options) -> bool:
    """Whether the instances run as Pallas kernels; otherwise XLA evaluates everything."""
    return why_no_kernels(graph, options) is None


def why_no_kernels(graph: RelGraph, options: Options) -> str | None:
    """Why XLA evaluates everything; None where the instances run as Pallas kernels."""
    return why_xla(options) or (None if graph.num_nodes > 0 else "the graph has no nodes")


def why_xla(options: Options) -> str | None:
    """Why XLA evaluates everything for any graph; None where kernels may run."""
    if options.backend == "xla":
        return 'the backend is "xla"'
    if "backward" in options.disable:
        return 'without the pass "backward" gradients are JAX\'s, of XLA operators'
    if options.backend == "auto" and not on_gpu() and options.interpret is not False:
        return f'the backend is "auto" and JAX\'s default device is a {platform().upper()}'
    return None


# `row_scaled` are row-scaled float16 forms of some inputs, and the second result those of some outputs, so that
# backward reads what forward stored. Derivatives flow through the arrays. Inside jit an array without another use is
# never made.
_inference = jax.jit(run_kernels, static_argnums=0, inline=True)
_differentiable = jax.custom_vjp(_inference, nondiff_argnums=(0,))


# JAX traces the forward rule once for each set of perturbed inputs, but keeps one tree of residuals: that of the last
# traced set. So all sets must have the same tree: every input, a fixed number of slots for saved values, and the set
# itself as the shape of an empty array.
_SPARE_SLOTS = 4
_BITS = 30  # of a set of positions, in one dimension


def _residual_slots(task: CompileTask) -> int:
    return training_cut(task, differentiable_positions(task)).num_saved + _SPARE_SLOTS


def _positions_as_array(positions: tuple[int, ...], count: int) -> jax.Array:
    bits = sum(1 << p for p in positions)
    return jnp.zeros((0, *((bits >> at) % (1 << _BITS) for at in range(0, count, _BITS))), jnp.int8)


def _positions_of_array(array: jax.Array, count: int) -> tuple[int, ...]:
    return tuple(p for p in range(count) if array.shape[1 + p // _BITS] >> (p % _BITS) & 1)


@broadcasting
@_lowered_as_chosen
def encode_shared(task: CompileTask, graph: RelGraph, values: Arrays, row_scaled: RowScaledInputs) -> RowScaledInputs:
    """`row_scaled` with row-scaled float16 copies of the inputs that both forward and backward read so.

    The copies are the same for all sets of perturbed inputs, as the tree of residuals must be.
    """
    given = (*row_scaled, *(None,) * (len(values) - len(row_scaled)))
    if not (task.row_scaled and uses_kernels(graph, task.options)) or "storage" in task.disable:
        return given
    parts, *tasks = training_tasks(task, differentiable_positions(task))
    forward, backward = (inference_kernels(part) for part in tasks)
    shared = shared_encodings(parts, forward, backward, task.counts.rows)
    readers, at = forward.first_readers(), forward.program.by_position()

    def encoded(position: int) -> EncodedCopy:
        with kernel_label(forward.program.name, readers[at[position]]):
            array = values[position]
            if position in task.rows.padded:  # columns are scaled by the largest of their valid elements
                array = where_rows(graph.node_mask, array)
            source = of_array(0, array.shape, tuple(range(1, array.ndim)))
            ((_, columns),) = column_powers([array], [source], interpret=task.options.interpret)
            return EncodedCopy(to_row_scaled(array, columns.reshape(array.shape[1:]), interpret=task.options.interpret))

    return tuple(encoded(p) if p in shared and rows is None else rows for p, rows in enumerate(given))


def _forward(task: CompileTask, graph: Any, inputs: Any, row_scaled: Any) -> tuple[tuple[Arrays, Kept], Any]:
    graph, row_scaled = jax.tree_util.tree_map(lambda p: p.value, (graph, row_scaled))
    values = tuple(p.value for p in inputs)
    wrt = tuple(p for p in differentiable_positions(task) if inputs[p].perturbed)
    if training_cut(task, wrt).num_saved > _residual_slots(task):
        wrt = differentiable_positions(task)
    found, kept = _run_forward(task, wrt, graph, values, row_scaled)
    return found, (graph, values, *kept)


@partial(jax.jit, static_argnums=(0, 1))
def _run_forward(
    task: CompileTask, wrt: tuple[int, ...], graph: RelGraph, values: Arrays, row_scaled: RowScaledInputs
) -> tuple[tuple[Arrays, Kept], tuple[RowScaledInputs, Any, jax.Array]]:
    parts, forward, _ = training_tasks(task, wrt)
    count = parts.num_outputs
    row_scaled = encode_shared(task, graph, values, row_scaled)
    # Differentiable itself, for gradients of gradients.
    results, kept = _differentiable(forward, graph, values, row_scaled)
    empty = jnp.zeros((0,), jnp.int8)
    saved = [
        (a, empty, empty, empty)
        if h is None
        else (a, h.mantissa, h.exponent, empty if h.columns is None else h.columns)
        for a, h in zip(results[count:], kept[count:], strict=True)
    ]
    unused = [(empty, empty, empty, empty)] * (_residual_slots(task) - len(saved))
    slots = (*saved, *unused)
    return (results[:count], kept[:count]), (row_scaled, slots, _positions_as_array(wrt, len(values)))


def _backward(task: CompileTask, residuals: Any, cotangents: Any) -> tuple[None, tuple, None]:
    graph, values, row_scaled, slots, chosen = residuals
    graph, values, row_scaled, slots = _compat.own_empty_arrays((graph, values, row_scaled, slots))
    cotangents, _ = cotangents
    num_inputs = len(values)
    wrt = _positions_of_array(chosen, num_inputs)
    parts, _, backward = training_tasks(task, wrt)
    saved = [s[0] for s in slots[: parts.num_saved]]
    saved_row_scaled = [
        of_stored(m, e, a.shape[1:], c if c.size else None) if m.size else None
        for a, m, e, c in slots[: parts.num_saved]
    ]
    kept = [values[p] for p in parts.needed]
    kept_row_scaled = [row_scaled[p] if p < len(row_scaled) else None for p in parts.needed]
    program = optimised(task)
    given = tuple(
        jnp.zeros((num_rows(graph, program.ops[o].space), *program.ops[o].shape), program.ops[o].dtype)
        if isinstance(c, SymbolicZero)
        else _compat.own_empty_arrays(c)
        for o, c in zip(program.outputs, cotangents, strict=True)
    )
    # Zeros are the same on all devices of a mesh; here they vary as the other arrays do, and so do their gradients.
    arrays = _compat.varying_alike((*kept, *saved, *given))
    found, _ = _compiled(backward, graph, arrays, (*kept_row_scaled, *saved_row_scaled))
    _, found = _compat.varying_alike((values, found))
    gradients = dict(zip(wrt, found, strict=True))
    return None, tuple(gradients.get(p) for p in range(num_inputs)), None


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


def run(task: CompileTask, graph: RelGraph, inputs: Arrays) -> Arrays:
    """The outputs of a program on arrays in the compiler's form; differentiable in the floating-point inputs.

    Traced arrays take a path without `jit` around forward and backward: under `jit` JAX would also trace the kernels of
    inference, and discard them where gradients are needed.
    """
    if "backward" in task.disable:
        return _compiled_alone(task, graph, inputs)[0]
    if not any(isinstance(array, jax.core.Tracer) for array in inputs):
        return _compiled(task, graph, inputs, ())[0]
    return _differentiable(task, graph, tuple(map(reverse_only, inputs)), ())[0]


_compiled_alone = jax.jit(run_kernels, static_argnums=0)
_compiled = jax.jit(_differentiable, static_argnums=0)


def forget_compiled() -> None:
    """Clears compiled programs, so that the next run compiles them with the current schedules."""
    for function in (_compiled, _compiled_alone, _inference, _run_forward):
        function.clear_cache()  # type: ignore[attr-defined]
