"""`@rgnn.program`: a Python function over a relational graph, compiled for each graph and each set of shapes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from dejax import _compat
from dejax.rgnn.compiler.execute import CompileTask, Counts, counts_of, no_gradient_of_padding, run, uses_kernels
from dejax.rgnn.compiler.frontend import Argument, GraphSymbol, ProgramError, trace_program
from dejax.rgnn.compiler.reverse_only import reverse_only
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space
from dejax.rgnn.lowering.node_rows import NodeRows
from dejax.rgnn.lowering.segments import valid_rows, where_rows
from dejax.rgnn.options import Options

if TYPE_CHECKING:
    from dejax.pallas.tuning import Measure
    from dejax.rgnn.compiler.explain import Explanation
    from dejax.rgnn.compiler.tune import TuningReport


@dataclass(frozen=True, slots=True)
class _Signature:
    """The key of a trace: the structure of the arguments, the arrays' names, shapes and dtypes, and static leaves."""

    tree: Any
    arrays: tuple[tuple[str, tuple[int, ...], str] | None, ...]  # name, shape, dtype of each leaf; None: a static leaf
    statics: tuple[_Static, ...]
    wide: bool  # whether JAX has 64 bits enabled, which decides the dtypes of sums of integers


@dataclass(frozen=True, slots=True)
class _Static:
    """A static leaf with its type and sign: 1, 1.0 and True are different keys, and so are 0.0 and -0.0."""

    kind: type
    value: Any
    negative: bool  # of a float

    @classmethod
    def of(cls, leaf: Any) -> _Static:
        return cls(type(leaf), leaf, isinstance(leaf, float) and math.copysign(1, leaf) < 0)


@dataclass(frozen=True, slots=True)
class _Traced:
    program: inter.OpProgram
    tree: Any  # of the result
    closed_over: tuple[Any, ...]  # arrays that are inputs after the arguments


class _ClosesOver(Exception):
    """Carries a trace that must not be cached: it closes over arrays, which may differ at the next call."""

    def __init__(self, traced: _Traced) -> None:
        self.traced = traced


_OTHER_GRAPHS: dict[type, Callable[..., Any]] = {}


def register_graph(kind: type, run: Callable[..., Any]) -> None:
    """Lets every program, and so every layer, take graphs of another class.

    Args:
      kind: the class, such as `dejax.distributed.ShardedGraph`. For layers it has the counts and masks of a `RelGraph`.
      run: called as `run(program, graph, options, args, kwargs)`, in place of the program.
    """
    _OTHER_GRAPHS[kind] = run


class Program:
    """A relational program: a Python function over a graph that is compiled to GPU kernels. `@rgnn.program` makes one.

    Call it with a `RelGraph` and the function's other arguments: arrays, or pytrees of arrays. What an array has a row
    for (a node, an edge, an edge type) follows from its use in the function. Arguments that are not arrays are static.
    A program runs inside and outside of `jax.jit`, under `jax.grad` (of floating-point arrays, to any order in reverse
    mode), `jax.vmap`, `jax.lax.scan` and `jax.checkpoint`.

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> @rgnn.program
    ... def weighted_sum(g, x, w):
    ...     return g.sum_to_dst(g.src(x) @ g.per_edge_type(w))
    >>> isinstance(weighted_sum, rgnn.Program)
    True
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> weighted_sum(graph, jnp.array([[1.0], [3.0], [5.0]]), jnp.array([[[1.0]], [[2.0]]]))[2]  # 1 * 1 + 2 * 3
    Array([7.], dtype=float32)
    """

    def __init__(self, function: Callable, options: Options) -> None:
        functools.update_wrapper(self, function)
        if not hasattr(function, "__name__"):  # for example a functools.partial
            self.__name__ = self.__qualname__ = type(function).__name__
        self.function, self.options = function, options
        self._trace = lru_cache(maxsize=256)(self._trace_uncached)

    def __repr__(self) -> str:
        return f"<rgnn.program {self.__name__}>"  # type: ignore[attr-defined]

    def with_options(self, **changes: Any) -> Program:
        """The same program with some options changed, named as the fields of `Options`."""
        return Program(self.function, replace(self.options, **changes))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the program's name where a module has it as an attribute, else its function; nothing compiled."""
        module, name = self.__module__, self.__qualname__  # type: ignore[attr-defined]
        found = _at(module, name)
        if isinstance(found, Program) and found.function is self.function:
            return _restored, (module, name, self.options)
        return Program, (self.function, self.options)

    def __call__(self, graph: RelGraph, *args: Any, options: Options | None = None, **kwargs: Any) -> Any:
        """Runs the program. Called with the `g` of another program, it becomes part of that program.

        Args:
          graph: the graph; also a `dejax.distributed.ShardedGraph`, whose arrays have the rows of its devices.
          *args: the function's arguments after `g`; inside another program also values of that program.
          options: used instead of the program's own. Inside another program the outermost program's options apply.
          **kwargs: the function's keyword arguments.

        Returns:
          The function's result with arrays in place of values: [rows of the space, *feature shape]. Edge values are in
          the user's order of edges. With `graph.only_destinations` node values have the rows of destinations alone.

        Raises:
          ProgramError: the program has a mistake; the message begins with its line.
          TypeError: `graph` is not a RelGraph.
        """
        if isinstance(graph, GraphSymbol):
            if options is not None:
                raise TypeError(
                    f"options must not be given to {self!r} inside another program, whose options apply; got {options}"
                )
            return self.function(graph, *args, **kwargs)
        if (other := _OTHER_GRAPHS.get(type(graph))) is not None:
            return other(self, graph, options, args, kwargs)
        task, tree, arrays = self._prepare(graph, options, args, kwargs)
        graph, arrays = _compat.varying_alike((graph, arrays))
        results = run(task, graph, _inputs(task, graph, arrays))
        ops = [task.program.ops[o] for o in task.program.outputs]
        found = [_from_rows(graph, op.space, r) for op, r in zip(ops, results, strict=True)]
        return jax.tree_util.tree_unflatten(tree, found)

    def explain(
        self,
        graph: RelGraph,
        *args: Any,
        options: Options | None = None,
        summary: bool = False,
        file: TextIO | None = None,
        svg: str | None = None,
        **kwargs: Any,
    ) -> Explanation:
        """Prints every stage of the compilation: both IRs around each pass, the kernels, their bytes, FLOPs and time.

        It shows what a call with these arguments and options runs on this machine: the kernels where the backend has
        them (on a CPU pass `Options(backend="pallas")` to see them), and the operators left to XLA, with the reason.

        Args:
          graph, *args, **kwargs: as for a call; arrays may be `jax.ShapeDtypeStruct`.
          options: used instead of the program's own.
          summary: whether to print for each pass only the operators that it removes and adds, with their lines.
          file: where to print; by default standard output.
          svg: path of a file for a drawing of the data flow before and after fusion.

        Returns:
          An `Explanation`. Its `.bounds()` compares the bytes of each kernel with the least that the function needs,
          and says which of the program's lines cost most.
        """
        from dejax.rgnn.compiler.explain import explain

        task, _, arrays = self._prepare(graph, options, args, kwargs)
        inputs = jax.eval_shape(lambda graph, given: _inputs(task, graph, given), graph, tuple(arrays))
        return explain(task, graph, inputs, summary=summary, file=file, svg=svg)

    def tune(
        self,
        graph: RelGraph,
        *args: Any,
        options: Options | None = None,
        gradients: bool = True,
        save: bool = True,
        measure: Measure | None = None,
        progress: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> TuningReport:
        """Finds the fastest schedules for the program's kernels on a graph, and stores them for later runs.

        Each kernel of the forward and backward pass runs with some dozens of tile sizes and numbers of warps on the
        given arrays. The fastest schedule is stored by device, kernel and shape (sizes rounded to powers of two), in a
        file in `$DEJAX_CACHE_DIR` or the user's cache folder. Programs compiled afterwards use it. Results change only
        by the order of additions. Tuning takes about a second for each kernel and candidate to compile.

        Args:
          graph, *args, **kwargs: as for a call.
          options: used instead of the program's own.
          gradients: whether to tune the backward pass, too.
          save: whether to store the schedules.
          measure: how candidates are timed; by default on the device, with the profiler.
          progress: called with a line of text after each kernel.

        Returns:
          The schedules; `print` shows them as a table.

        Raises:
          RuntimeError: there is no GPU.
          TypeError: called inside `jax.jit`.
        """
        from dejax.rgnn.compiler.tune import tune

        task, _, arrays = self._prepare(graph, options, args, kwargs)
        return tune(
            task,
            graph,
            _inputs(task, graph, arrays),
            gradients=gradients,
            save=save,
            measure=measure,
            progress=progress or (lambda line: None),
        )

    def _prepare(
        self, graph: RelGraph, options: Options | None, args: tuple, kwargs: dict
    ) -> tuple[CompileTask, Any, list[Any]]:
        if isinstance(graph, GraphSymbol):
            raise TypeError(
                f"{self!r} must be explained or tuned outside of other programs, with a RelGraph, got a program's g"
            )
        if not isinstance(options, Options | None):
            raise TypeError(f"options must be rgnn.Options, got {type(options).__name__}")
        if not isinstance(graph, RelGraph):
            raise TypeError(
                f"the first argument of {self!r} must be a RelGraph, got {type(graph).__name__}; make one with "
                "RelGraph.from_edges, RelGraph.from_relations or dejax.rgnn.interop.from_graphs_tuple"
            )
        counts = counts_of(graph)
        program, tree, arrays = self.traced(counts, args, kwargs)
        chosen = (options or self.options).with_default_precision()
        rows = NodeRows.of(graph, program, padded=uses_kernels(graph, chosen))
        task = CompileTask(program, counts, chosen, rows)
        return task, tree, arrays

    def traced(self, counts: Counts, args: tuple, kwargs: dict) -> tuple[inter.OpProgram, Any, list[Any]]:
        """Traces the function for arguments with as many rows as `counts` says.

        Returns:
          The level-1 program; the pytree structure of the function's result; and the program's inputs: the arrays of
          the arguments, then the arrays that the function closes over.
        """
        signature, arrays = self._signature(args, kwargs)
        try:
            traced = self._trace(signature, counts)
        except _ClosesOver as found:
            traced = found.traced
        return traced.program, traced.tree, [*arrays, *map(_canonical, traced.closed_over)]

    def _signature(self, args: tuple, kwargs: dict) -> tuple[_Signature, list[Any]]:
        """What a trace of a call depends on, for its cache; and the arrays among the arguments."""
        try:
            bound = inspect.signature(self.function).bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self!r}: {error}") from None
        names = list(bound.arguments)
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        described: list[tuple[str, tuple[int, ...], str] | None] = []
        arrays, statics = [], []
        for path, leaf in paths:
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                dtype = jax.dtypes.canonicalize_dtype(np.dtype(leaf.dtype))
                described.append((_name(path, names), tuple(leaf.shape), dtype.name))
                arrays.append(_canonical(leaf))
            else:
                described.append(None)
                statics.append(_Static.of(leaf))
        signature = _Signature(
            tree, tuple(described), tuple(statics), jax.dtypes.canonicalize_dtype("int64").itemsize == 8
        )
        try:
            hash(signature)
        except TypeError:
            bad = next(s.kind for s in statics if getattr(s.kind, "__hash__", None) is None)
            raise TypeError(f"{self!r}: arguments must be arrays or hashable, got {bad.__name__}") from None
        return signature, arrays

    def _trace_uncached(self, signature: _Signature, counts: Counts) -> _Traced:
        def rebuild(symbols: list[Argument]) -> tuple[tuple, dict]:
            given, statics = iter(symbols), (s.value for s in signature.statics)
            leaves = [next(given) if a is not None else next(statics) for a in signature.arrays]
            return jax.tree_util.tree_unflatten(signature.tree, leaves)

        rows = {space: counts.rows(space) for space in Space}
        arguments = [a for a in signature.arrays if a is not None]
        name: str = self.__name__  # type: ignore[attr-defined]
        program, tree, closed_over = trace_program(name, self.function, rows, arguments, rebuild)
        traced = _Traced(program, tree, closed_over)
        if closed_over:
            raise _ClosesOver(traced)  # which lru_cache does not keep
        return traced


def _at(module: str, name: str) -> Any:
    """The attribute of a module by a qualified name; None where there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _restored(module: str, name: str, options: Options) -> Program:
    importlib.import_module(module)
    found: Program = _at(module, name)
    return found if found.options == options else found.with_options(**dataclasses.asdict(options))


def _canonical(array: Any) -> Any:
    """An array in the dtype that jax gives it: numpy's float64 becomes float32 unless jax has 64 bits enabled."""
    if not isinstance(array, np.ndarray | np.generic):
        return array
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _name(path: tuple, names: list[str]) -> str:
    """A readable name of an argument: `w`, or `params['root']`."""
    kind, *rest = path
    first, rest = (rest[0], rest[1:])
    if kind.idx == 0:
        at = 1 + first.idx
        name = names[at] if at < len(names) else f"argument {at}"
    else:
        name = str(first.key)
    return name + jax.tree_util.keystr(tuple(rest))


def _inputs(task: CompileTask, graph: RelGraph, arrays: list[Any]) -> tuple[Any, ...]:
    """The arguments in the compiler's form, by position."""
    inputs: list[Any] = [jnp.zeros((0,))] * len(arrays)  # for arguments that the program does not use
    for i in task.program.inputs:
        op = task.program.ops[i]
        position = op.attr("position")
        if position in task.rows.padded:
            inputs[position] = no_gradient_of_padding(reverse_only(jnp.asarray(arrays[position])), graph.node_mask)
        else:
            inputs[position] = _to_rows(graph, op.space, arrays[position])
    return tuple(inputs)


def _to_rows(graph: RelGraph, space: Space, x: Any) -> jax.Array:
    """An argument in the compiler's form; rows that are padding become zeros."""
    x = jnp.asarray(x)
    if space == Space.GRAPH:
        return x[None]
    if space == Space.EDGE:
        x = x.at[graph.edge_ids].get(unique_indices=True, mode="fill", fill_value=0)
    return where_rows(valid_rows(graph, space), x)


def _from_rows(graph: RelGraph, space: Space, x: jax.Array) -> jax.Array:
    if space == Space.GRAPH:
        return x[0]
    mask, rows = valid_rows(graph, space), None
    if graph.only_destinations and space == Space.NODE:
        rows = graph.num_destinations
    x = where_rows(None if mask is None else mask[:rows], x[:rows])
    return x.at[graph.edge_positions].get(unique_indices=True) if space == Space.EDGE else x


def program(function: Callable | None = None, **options: Any) -> Any:
    """Makes a relational program of a Python function `f(g, *arrays)`. Use it as a decorator.

    Args:
      function: the function. Its first parameter stands for the graph (a `GraphSymbol`): `g.src(x)`, `g.sum_to_dst(y)`.
      **options: fields of `Options`.

    Returns:
      A `Program`, to be called with a `RelGraph` and arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from dejax import rgnn
      >>> @rgnn.program
      ... def mean_of_neighbours(g, h):
      ...     return g.mean_to_dst(g.src(h))
      >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 0], num_nodes=3)
      >>> print(mean_of_neighbours(graph, jnp.array([[1.0], [3.0], [5.0]])))
      [[0.]
       [0.]
       [2.]]
    """
    if function is None:
        return functools.partial(program, **options)
    return Program(function, Options(**options))


__all__ = ["Options", "Program", "ProgramError", "program"]
