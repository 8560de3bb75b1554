"""`@rgnn.program`: a Python function over a relational graph, compiled for each graph and each set of shapes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from dejax.rgnn.compiler.execute import Counts, Task, counts_of, run
from dejax.rgnn.compiler.frontend import Argument, GraphSymbol, ProgramError, trace_program
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space
from dejax.rgnn.lowering.segments import valid_rows
from dejax.rgnn.options import Options

if TYPE_CHECKING:
    from dejax.pallas.tuner import Measure
    from dejax.rgnn.compiler.tune import Report


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a call is compiled for: where arrays stand among the arguments, their shapes, and everything else."""

    tree: Any
    arrays: tuple[tuple[str, tuple[int, ...], str] | None, ...]  # name, shape, dtype of each leaf; None: a static leaf
    statics: tuple[_Static, ...]


@dataclass(frozen=True, slots=True)
class _Static:
    """A static leaf; unlike Python's numbers 1, 1.0 and True are three."""

    kind: type
    value: Any


@dataclass(frozen=True, slots=True)
class _Traced:
    program: inter.Program
    tree: Any  # of the result
    closed_over: tuple[Any, ...]  # arrays that are inputs after the arguments


class _ClosesOver(Exception):
    """Carries a trace that is not to be kept: the arrays that it closes over may be others at the next call."""

    def __init__(self, traced: _Traced) -> None:
        self.traced = traced


class Program:
    """A relational program; made by `@rgnn.program`.

    Call it with a `RelGraph` and the function's other arguments, which are arrays (or pytrees of arrays) with one row
    for each element of the space they are used in; other leaves are static. It runs inside or outside `jax.jit`, under
    `jax.grad` (of floating-point arrays, to any order in reverse mode), `jax.vmap`, `jax.lax.scan`, `jax.checkpoint`.
    """

    def __init__(self, function: Callable, options: Options) -> None:
        functools.update_wrapper(self, function)
        if not hasattr(function, "__name__"):  # a partial function, say
            self.__name__ = self.__qualname__ = type(function).__name__
        self.function, self.options = function, options
        self._trace = lru_cache(maxsize=256)(self._trace_uncached)

    def __repr__(self) -> str:
        return f"<rgnn.program {self.__name__}>"  # type: ignore[attr-defined]

    def with_options(self, **changes: Any) -> Program:
        """The same program with other options, by the names of `Options`."""
        return Program(self.function, replace(self.options, **changes))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name where the program has one, else by its function; what is compiled stays behind."""
        module, name = self.__module__, self.__qualname__  # type: ignore[attr-defined]
        found = _at(module, name)
        if isinstance(found, Program) and found.function is self.function:
            return _restored, (module, name, self.options)
        return Program, (self.function, self.options)

    def __call__(self, graph: RelGraph, *args: Any, options: Options | None = None, **kwargs: Any) -> Any:
        """Runs the program; or, called with the `g` of another program, is part of that.

        Args:
          graph: the graph.
          *args: the function's arguments after `g`; in another program its values, too.
          options: instead of the program's own; in another program those of the outermost hold.
          **kwargs: the function's keyword arguments.

        Returns:
          What the function returns, arrays in place of values: [rows of the space, *feature shape]; edge values are in
          the order of the edges that the graph was made from.

        Raises:
          ProgramError: the function makes no sense; the message begins with its line.
          TypeError: `graph` is not a RelGraph.
        """
        if isinstance(graph, GraphSymbol):
            if options is not None:
                raise TypeError(f"{self!r} is called in another program, whose options hold; got options={options}")
            return self.function(graph, *args, **kwargs)
        task, tree, arrays = self._prepare(graph, options, args, kwargs)
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
    ) -> None:
        """Prints every stage of the compilation: both IRs around each pass, the kernels, their bytes, FLOPs and time.

        It shows what a call with these arguments and options runs here: the kernels where the backend has them (on a
        CPU ask for `Options(backend="pallas")` to see them), and XLA's part, with the reason.

        Args:
          graph, *args, **kwargs: as for a call; arrays may be `jax.ShapeDtypeStruct`.
          options: instead of the program's own.
          summary: of each pass only the operators that it takes away and adds, with the lines that they come from.
          file: where to print; standard output by default.
          svg: a path: the data flow before and after fusion is drawn there.
        """
        from dejax.rgnn.compiler.explain import explain

        task, _, arrays = self._prepare(graph, options, args, kwargs)
        inputs = jax.eval_shape(lambda graph, given: _inputs(task, graph, given), graph, tuple(arrays))
        explain(task, graph, inputs, summary=summary, file=file, svg=svg)

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
    ) -> Report:
        """Finds the fastest schedules for the program's kernels on a graph, and keeps them for later runs.

        Each kernel of the forward and backward pass is run with some dozens of tile sizes and numbers of warps, on the
        arrays given; the fastest is kept by device, kernel and shape (sizes rounded to powers of two), in a file in
        `$DEJAX_CACHE_DIR` or the user's cache folder. Programs compiled from then on use it. Results do not change
        beyond the order of additions. It takes about a second for each kernel and candidate that must be compiled.

        Args:
          graph, *args, **kwargs: as for a call.
          options: instead of the program's own.
          gradients: whether to tune the backward pass, too.
          save: whether to keep what was found.
          measure: how candidates are timed; by default on the device, by the profiler.
          progress: called with a line of text for each kernel done.

        Returns:
          What was found; `print` shows it as a table.

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
    ) -> tuple[Task, Any, list[Any]]:
        if isinstance(graph, GraphSymbol):
            raise TypeError(f"{self!r} is explained or tuned in another program; do so with a RelGraph, outside")
        if not isinstance(options, Options | None):
            raise TypeError(f"options must be rgnn.Options, got {type(options).__name__}")
        if not isinstance(graph, RelGraph):
            raise TypeError(
                f"{self!r} takes a RelGraph first, got {type(graph).__name__}; make one with RelGraph.from_edges, "
                "from_relations or dejax.rgnn.interop.from_graphs_tuple"
            )
        signature, arrays = self._signature(graph, args, kwargs)
        counts = counts_of(graph)
        try:
            traced = self._trace(signature, counts)
        except _ClosesOver as found:
            traced = found.traced
        arrays = [*arrays, *map(_canonical, traced.closed_over)]
        return Task(traced.program, counts, options or self.options), traced.tree, arrays

    def _signature(self, graph: RelGraph, args: tuple, kwargs: dict) -> tuple[_Signature, list[Any]]:
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
                statics.append(_Static(type(leaf), leaf))
        signature = _Signature(tree, tuple(described), tuple(statics))
        try:
            hash(signature)
        except TypeError:
            bad = next(s.kind for s in statics if getattr(s.kind, "__hash__", None) is None)
            raise TypeError(f"{self!r}: an argument is neither an array nor hashable: {bad.__name__}") from None
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
    """What a module has by a qualified name; None where there is nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _restored(module: str, name: str, options: Options) -> Program:
    importlib.import_module(module)
    found: Program = _at(module, name)
    return found if found.options == options else found.with_options(**dataclasses.asdict(options))


def _canonical(array: Any) -> Any:
    """An array as jax takes it: numpy's float64 is float32, unless jax has 64 bits enabled."""
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


def _inputs(task: Task, graph: RelGraph, arrays: list[Any]) -> tuple[Any, ...]:
    """The arguments in the compiler's form, by position."""
    inputs: list[Any] = [jnp.zeros((0,))] * len(arrays)  # arguments that the program never uses
    for i in task.program.inputs:
        op = task.program.ops[i]
        inputs[op.attr("position")] = _to_rows(graph, op.space, arrays[op.attr("position")])
    return tuple(inputs)


def _to_rows(graph: RelGraph, space: Space, x: Any) -> jax.Array:
    """An argument in the compiler's form; rows that are padding become zeros."""
    x = jnp.asarray(x)
    if space == Space.GRAPH:
        return x[None]
    if space == Space.EDGE:
        x = x.at[graph.edge_ids].get(unique_indices=True, mode="fill", fill_value=0)
    mask = valid_rows(graph, space)
    return x if mask is None else jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def _from_rows(graph: RelGraph, space: Space, x: jax.Array) -> jax.Array:
    if space == Space.GRAPH:
        return x[0]
    mask = valid_rows(graph, space)
    if mask is not None:
        x = jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
    return x.at[graph.edge_positions].get(unique_indices=True) if space == Space.EDGE else x


def program(function: Callable | None = None, **options: Any) -> Any:
    """Makes a relational program of a function `f(g, *arrays)`.

    Args:
      function: the function; its first parameter is the graph inside the program (`GraphSymbol`).
      **options: fields of `Options`.

    Returns:
      A `Program`, called with a `RelGraph` and arrays.

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
