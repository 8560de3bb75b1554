"""`over_mesh`: a program of the front end on a graph that is spread over devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dejax import _compat
from dejax.distributed.full_graph._rewrite import SOURCE_PAIRS, CannotDistribute
from dejax.distributed.full_graph._run import DeviceRun
from dejax.distributed.full_graph._sharded_graph import ShardedGraph
from dejax.distributed.full_graph._stages import Distributed, distribute
from dejax.rgnn.compiler.program import Program, ProgramError, register_graph
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Op, Space
from dejax.rgnn.options import Options


def over_mesh(program: Program) -> MeshProgram:
    """Makes a program for one device run, forward and backward, on a graph that is divided over a mesh.

    Programs and the layers of `dejax.rgnn.nnx` and `dejax.rgnn.linen` also accept a `ShardedGraph` directly. Use
    `over_mesh` where you want to see the plan of the exchanges or the bytes that they send.

    Args:
        program: a function made by `@rgnn.program`: from `dejax.rgnn.library` or `dejax.rgnn.zoo`, or your own.

    Returns:
        A function that takes a `ShardedGraph` and then the program's arguments. Arrays with one row for each node have
        the layout [rows, *F] of `ShardedGraph.shard_nodes`, and arrays with one row for each edge that of
        `shard_edges`, as arguments and as results. All other arrays are replicated on every device. The function works
        inside and outside of `jax.jit` and under `jax.grad`.

    Raises:
        TypeError: `program` was not made by `@rgnn.program`.
    """
    if not isinstance(program, Program):
        raise TypeError(
            f"program must be made by @rgnn.program, got {type(program).__name__}; call a layer of dejax.rgnn.nnx or "
            "linen with the ShardedGraph as it is, layer(graph, x)"
        )
    return MeshProgram(program)


class MeshProgram:
    """A program that runs over the devices of a mesh, as `over_mesh` makes it.

    >>> import jax.numpy as jnp, numpy as np
    >>> from dejax.distributed import make_mesh
    >>> from dejax.distributed.full_graph import ShardedGraph, over_mesh
    >>> from dejax.rgnn import RelGraph, library
    >>> graph = RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> split = ShardedGraph.from_graph(graph, np.zeros(3, int), make_mesh(1))
    >>> layer = over_mesh(library.rgcn)
    >>> y = layer(split, split.shard_nodes(np.ones((3, 2), np.float32)), {"weight": jnp.ones((2, 2, 4))})
    >>> split.unshard_nodes(y).shape, layer.bytes_sent(split, y[:, :2], {"weight": jnp.ones((2, 2, 4))})
    ((3, 4), 0)
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def __repr__(self) -> str:
        return f"<over_mesh of {self.program!r}>"

    def __call__(self, graph: ShardedGraph, *args: Any, options: Options | None = None, **kwargs: Any) -> Any:
        """Runs the program.

        Args:
            graph: the graph.
            *args, **kwargs: see `over_mesh`.
            options: used instead of the program's own.

        Raises:
            ProgramError: the program has a mistake.
            CannotDistribute: the program has an operator that is not supported over devices.
            TypeError: `graph` is not a ShardedGraph.
        """
        plan, tree, arrays = self._prepare(graph, args, kwargs)
        positions = [plan.program.ops[i].attr("position") for i in plan.program.inputs]
        given = {position: arrays[position] for position in positions}
        chosen = (options or self.program.options).with_default_precision()
        return jax.tree_util.tree_unflatten(tree, _run(plan, chosen, graph, given))

    def plan(self, graph: ShardedGraph, *args: Any, **kwargs: Any) -> Distributed:
        """The stages and the collectives of a call with these arguments.

        The arguments may be `jax.ShapeDtypeStruct`s.
        """
        return self._prepare(graph, args, kwargs)[0]

    def bytes_sent(self, graph: ShardedGraph, *args: Any, **kwargs: Any) -> int:
        """Bytes that all devices together send to each other in one forward pass with these arguments.

        A backward pass sends the same number, less the values through which no gradient flows. Small reductions over
        the whole graph or over its types are not counted.
        """
        return self.plan(graph, *args, **kwargs).exchanged_bytes * graph.layout.rows_sent

    def _prepare(self, graph: ShardedGraph, args: tuple, kwargs: dict) -> tuple[Distributed, Any, list[Any]]:
        if not isinstance(graph, ShardedGraph):
            raise TypeError(
                f"the first argument of {self!r} must be a ShardedGraph, got {type(graph).__name__}; make one with "
                "ShardedGraph.from_graph"
            )
        try:
            program, tree, arrays = self.program.traced(_counts(graph), args, kwargs)
        except ProgramError as error:
            if "g.source_pair" not in str(error):
                raise
            raise CannotDistribute(f"{str(error).partition(': ')[0]}: {SOURCE_PAIRS}") from None
        return distribute(program, _counts(graph), graph.parts), tree, arrays


def _run_program(program: Program, graph: ShardedGraph, options: Options | None, args: tuple, kwargs: dict) -> Any:
    return MeshProgram(program)(graph, *args, options=options, **kwargs)


register_graph(ShardedGraph, _run_program)


def _counts(graph: ShardedGraph) -> Counts:
    local = graph.local
    return Counts(
        nodes=graph.num_rows,
        edges=graph.num_edge_rows,
        source_pairs=graph.parts * local.num_source_pairs,
        destination_pairs=graph.parts * local.num_destination_pairs,
        edge_types=local.num_edge_types,
        node_types=local.num_node_types,
        typed_sources=local.edge_type_by_source is not None,
    )


def _has_rows(op: Op) -> bool:
    """Whether each device has its own rows of the value."""
    return op.space in (Space.NODE, Space.EDGE, Space.DESTINATION_PAIR)


@partial(jax.jit, static_argnums=(0, 1))
def _run(plan: Distributed, options: Options, graph: ShardedGraph, given: dict[int, Any]) -> tuple[jax.Array, ...]:
    """The results, of arrays by position; under jit, outside of which `shard_map` does not take programs' gradients."""
    split, whole = PartitionSpec(graph.axis), PartitionSpec()
    ops = plan.program.ops
    by_position = {ops[i].attr("position"): ops[i] for i in plan.program.inputs}
    mapped = jax.shard_map(
        partial(_on_device, plan, options),
        mesh=graph.mesh,
        in_specs=(
            jax.tree.map(lambda leaf: split, graph),
            {position: split if _has_rows(by_position[position]) else whole for position in given},
        ),
        out_specs=tuple(split if _has_rows(ops[o]) else whole for o, _ in plan.outputs),
        check_vma=False,
    )
    found: tuple[jax.Array, ...] = mapped(graph, given)
    return found


def _on_device(
    plan: Distributed, options: Options, graph: ShardedGraph, given: dict[int, Any]
) -> tuple[jax.Array, ...]:
    graph, given = _compat.own_empty_arrays((graph, given))
    return DeviceRun(plan, graph, options)(given)
