"""Runs the stages of a distributed program inside `shard_map`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dejax.distributed.full_graph._exchange import collect, collect_extremum, exchange_beside
from dejax.distributed.full_graph._sharded_graph import ShardedGraph, local_part
from dejax.distributed.full_graph._stages import Combine, Distributed, Exchange, Form, Ref, Stage, form_of
from dejax.pallas import RowScaled, clear_rows
from dejax.rgnn.compiler.execute import CompileTask, counts_of, input_may_be_rounded, run_keeping, uses_kernels
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir.inter import Op, Space, is_float
from dejax.rgnn.lowering.node_rows import ALL_ROWS, NodeRows, first_rows, longer
from dejax.rgnn.lowering.segments import (
    extremum_at,
    extremum_of_all,
    lowest,
    segments,
    valid_rows,
    where_rows,
)
from dejax.rgnn.options import Options
from dejax.rgnn.passes.kernels.storage import linear_in


class DeviceRun:
    """One device's run of a distributed program.

    Args:
        plan: the program.
        graph: the graph, of which each table has one part.
        options: the options of the compiler.
    """

    def __init__(self, plan: Distributed, graph: ShardedGraph, options: Options) -> None:
        self.plan, self.options = plan, options
        self.owned, self.local, self.send = local_part(graph)
        self.rounds, self.axis = graph.layout.rounds, graph.axis
        self.rows, self.halo = graph.layout.rows, graph.layout.halo
        self.values: dict[Ref, jax.Array] = {}
        self.padded: set[Ref] = set()  # arguments of nodes, with any values in rows that are padding
        self.beside: list[Ref] = []  # values that stages of own nodes gave since the last exchange
        self.received: set[Ref] = set()  # values of own and halo nodes that an exchange made
        self.narrow: dict[Ref, RowScaled] = {}  # values that a stage stored as row-scaled float16, for later stages

    def __call__(self, arrays: dict[int, jax.Array]) -> tuple[jax.Array, ...]:
        """The results for the device's rows of the arguments, by position."""
        ops, inputs = self.plan.program.ops, self.plan.program.inputs
        given = _sent_before_sums({i: arrays[ops[i].attr("position")] for i in inputs})
        for i, x in given.items():
            self.values[i, form_of(ops[i])] = self._given(i, x)
        for step in self.plan.steps:
            if isinstance(step, Stage):
                self._stage(step)
            elif isinstance(step, Exchange):
                self._exchange(step)
            else:
                self._combine(step)
        return tuple(self._result(ops[value], self.values[value, form]) for value, form in self.plan.outputs)

    def _graph(self, on_edges: bool) -> RelGraph:
        return self.local if on_edges else self.owned

    def _given(self, i: int, x: jax.Array) -> jax.Array:
        """An argument in the compiler's form; rows that are padding become zeros, or are noted in `padded`."""
        op = self.plan.program.ops[i]
        if op.space == Space.GRAPH:
            return x[None]
        if op.space == Space.NODE and is_float(op.dtype) and uses_kernels(self.owned, self.options):
            self.padded.add((i, Form.OWN))
            return _without_gradient_of_padding(x, self._nodes_by_type(), self.options.interpret)
        if op.space == Space.EDGE:
            x = x.at[self.local.edge_ids].get(unique_indices=True, mode="fill", fill_value=0)
        return where_rows(valid_rows(self._graph(op.space != Space.NODE), op.space), x)

    def _result(self, op: Op, x: jax.Array) -> jax.Array:
        if op.space == Space.GRAPH:
            return x[0]
        graph = self._graph(op.space != Space.NODE)
        if op.space == Space.NODE and uses_kernels(graph, self.options):
            return _cleared(x, graph.node_mask, self._nodes_by_type(), self.options.interpret)
        x = where_rows(valid_rows(graph, op.space), x)
        return x.at[self.local.edge_positions].get(unique_indices=True) if op.space == Space.EDGE else x

    def _nodes_by_type(self) -> tuple[Any, Any]:
        """The offsets and the order of the device's own nodes by type; padding comes last."""
        return self.owned.by_node_type.offsets, self.owned.by_node_type.order

    def _stage(self, stage: Stage) -> None:
        """Runs one stage on this device, and stores its outputs."""
        inputs = tuple(self._read(ref, stage.on_edges) for ref in stage.inputs)
        narrow = tuple(self._narrow(ref, stage.on_edges) for ref in stage.inputs)
        task = replace(self._task(stage), row_scaled_outputs=self._outputs_in_16_bits(stage))
        found, kept = run_keeping(task, self._graph(stage.on_edges), inputs, narrow)
        for ref, x, rows in zip(stage.outputs, found, kept, strict=True):
            longer_than_own = ref[1] == Form.OWN and stage.on_edges
            self.values[ref] = x[: self.rows] if longer_than_own else x
            if rows is not None:
                rows = jax.lax.stop_gradient(rows)  # gradients flow through the array
                self.narrow[ref] = first_rows(rows, self.rows) if longer_than_own else rows
        if not stage.on_edges:
            self.beside += stage.outputs

    def _task(self, stage: Stage) -> CompileTask:
        graph, rows = self._graph(stage.on_edges), ALL_ROWS
        if not stage.on_edges:  # kernels know which rows are padding: they wait for no copy with zeros there
            rows = NodeRows(padded=tuple(n for n, ref in enumerate(stage.inputs) if ref in self.padded))
        elif graph.num_destinations is not None:
            given, made = (
                tuple(n for n, (_, form) in enumerate(refs) if form == Form.OWN)
                for refs in (stage.inputs, stage.outputs)
            )
            rows = NodeRows(zero_elsewhere=given, read_at_destinations=made)
        # The gradients of what came from other devices travel back while those of weights are computed.
        received = tuple(n for n, ref in enumerate(stage.inputs) if ref in self.received)
        return CompileTask(stage.program, counts_of(graph), self.options, rows, received=received)

    def _outputs_in_16_bits(self, stage: Stage) -> tuple[int, ...]:
        """Indices of outputs that may be stored as row-scaled float16, as in a program of one device.

        Later stages alone read them, each in products and sums.
        """
        steps, program = self.plan.steps, self.plan.program
        collected = {v for step in steps if isinstance(step, Exchange) for v in step.values}
        collected.update(a for step in steps if isinstance(step, Combine) for a in program.ops[step.value].args)
        found = []
        for n, ref in enumerate(stage.outputs):
            readers = [step for step in steps if isinstance(step, Stage) and ref in step.inputs]
            if (
                ref[1] == Form.OWN
                and ref not in self.plan.outputs
                and ref[0] not in collected
                and linear_in(program, ref[0])
                and all(input_may_be_rounded(self._task(step), step.inputs.index(ref)) for step in readers)
            ):
                found.append(n)
        return tuple(found)

    def _narrow(self, ref: Ref, on_edges: bool) -> RowScaled | None:
        rows = self.narrow.get(ref)
        return longer(rows, self.halo) if rows is not None and on_edges else rows

    def _read(self, ref: Ref, on_edges: bool) -> jax.Array:
        x = self.values[ref]
        if ref[1] != Form.OWN or not on_edges:
            return x
        if ref in self.padded:
            x = _zeros_in_padding(x, self.owned.node_mask)
        return jnp.pad(x, ((0, self.halo), *((0, 0),) * (x.ndim - 1)))  # halo rows, which no result depends on

    def _exchange(self, step: Exchange) -> None:
        """One exchange for all values of a dtype, side by side, while stages of own nodes compute the others."""
        ops = self.plan.program.ops
        by_dtype: dict[str, list[int]] = {}
        for value in step.values:
            by_dtype.setdefault(ops[value].dtype, []).append(value)
        beside = [ref for ref in self.beside if ref[0] not in step.values]
        self.beside = []
        for values in by_dtype.values():
            refs: list[Ref] = [(value, Form.OWN) for value in values]
            own = self._side_by_side([self.values[ref] for ref in refs])
            valid = None if self.padded.isdisjoint(refs) else self.owned.node_mask
            others = tuple(self.narrow.get(ref, self.values[ref]) for ref in beside)
            found, others = exchange_beside(own, valid, others, self.send, self.rounds, self.axis)
            for ref, other in zip(beside, others, strict=True):
                if isinstance(other, RowScaled):
                    self.narrow[ref] = other
                else:
                    self.values[ref] = other
            start = 0
            for value in values:
                part = found[:, start : start + ops[value].width]
                self.values[value, Form.LOCAL] = part.reshape(self.rows + self.halo, *ops[value].shape)
                self.received.add((value, Form.LOCAL))
                start += ops[value].width

    def _side_by_side(self, arrays: list[jax.Array]) -> jax.Array:
        """[own rows, width of all]."""
        flat = [x.reshape(self.rows, math.prod(x.shape[1:])) for x in arrays]
        return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)

    def _combine(self, step: Combine) -> None:
        op = self.plan.program.ops[step.value]
        if step.extremum is not None:
            self.values[step.value, form_of(op)] = self._extremum(op, 1 if step.extremum == "max" else -1)
            return
        x = self.values[step.value, Form.PARTIAL]
        if step.to_owners:
            self.values[step.value, Form.OWN] = collect(x, self.send, self.rounds, self.axis)
        else:
            self.values[step.value, Form.SHARED] = jax.lax.psum(x, self.axis)

    def _extremum(self, op: Op, sign: int) -> jax.Array:
        """The maximum (or minimum) over rows of all devices; 0 where there is none, or none is finite."""
        ops = self.plan.program.ops
        x = jax.lax.stop_gradient(self.values[op.args[0], form_of(ops[op.args[0]])])
        space = ops[op.args[0]].space
        graph = self._graph(space != Space.NODE)
        none, valid = lowest(x.dtype, sign), valid_rows(graph, space)
        x = where_rows(valid, x, none)
        if op.name == "place":
            ids = self.values[op.args[1], form_of(ops[op.args[1]])]
            size = op.attr("size")
            ids = jnp.where(ids < 0, size, ids)  # numpy would count them from the end
            found = extremum_at(jnp.full((size, *x.shape[1:]), none, x.dtype).at[ids], x, sign)[None]
        elif op.attr("via") == "all":
            found = extremum_of_all(x, sign)
        else:
            group = segments(graph, op.attr("via"))
            found = extremum_at(jnp.full((group.num_rows, *x.shape[1:]), none, x.dtype).at[group.index], x, sign)
        if op.space == Space.NODE:
            found = collect_extremum(found, self.send, self.rounds, self.axis, sign)
        else:
            nan = jax.lax.psum((found != found).astype(jnp.float32), self.axis) > 0  # which the other two may drop
            found = jax.lax.pmax(found, self.axis) if sign > 0 else jax.lax.pmin(found, self.axis)
            if jnp.issubdtype(x.dtype, jnp.floating):
                found = jnp.where(nan, jnp.full((), jnp.nan, x.dtype), found)
        # As in the kernels. Integers that equal the lowest value count as none, too.
        return jnp.where(found == none, jnp.zeros((), x.dtype), found)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cleared(x: jax.Array, valid: jax.Array, tables: Any, interpret: bool | None) -> jax.Array:
    """`x` with zeros in padding rows: written in place, where a select would copy all rows.

    `tables` are the offsets and the order of the nodes by type.
    """
    return clear_rows([x], tables[0], order=tables[1], interpret=interpret)[0]


def _cleared_forward(
    x: jax.Array, valid: jax.Array, tables: Any, interpret: bool | None
) -> tuple[jax.Array, jax.Array]:
    return _cleared(x, valid, tables, interpret), valid


def _cleared_backward(interpret: bool | None, valid: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return where_rows(valid, cotangent), None, None


_cleared.defvjp(_cleared_forward, _cleared_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _without_gradient_of_padding(x: jax.Array, tables: Any, interpret: bool | None) -> jax.Array:
    """`x`, in whose gradient zeros are written in padding rows, in place as by `_cleared`."""
    return x


def _without_gradient_forward(x: jax.Array, tables: Any, interpret: bool | None) -> tuple[jax.Array, Any]:
    return x, tables


def _without_gradient_backward(interpret: bool | None, tables: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return clear_rows([cotangent], tables[0], order=tables[1], interpret=interpret)[0], None


_without_gradient_of_padding.defvjp(_without_gradient_forward, _without_gradient_backward)


@jax.custom_vjp
def _zeros_in_padding(x: jax.Array, valid: jax.Array) -> jax.Array:
    """`x` with zeros in padding rows; its gradient there is anything."""
    return where_rows(valid, x)


def _zeros_forward(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, None]:
    return where_rows(valid, x), None


def _zeros_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return cotangent, None


_zeros_in_padding.defvjp(_zeros_forward, _zeros_backward)


@jax.custom_vjp
def _sent_before_sums(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """The arguments. The device's gradients of all of them exist before devices add up those of weights.

    XLA schedules one collective at a time. If it began with the sum, the exchange of rows would wait for it, and so for
    all kernels that compute gradients of weights: none would be left to run beside the exchange.
    """
    return arrays


def _sent_before_sums_forward(arrays: Any) -> tuple[Any, None]:
    return arrays, None


def _sent_before_sums_backward(_: None, cotangents: Any) -> tuple[Any]:
    return (jax.lax.optimization_barrier(cotangents),)


_sent_before_sums.defvjp(_sent_before_sums_forward, _sent_before_sums_backward)
