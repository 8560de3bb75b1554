"""A function cut into stages at its reads of host memory, so that a loop runs the stages in several iterations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend import core

from dejax._jaxprs import part, variables
from dejax.host_gather import PendingRows
from dejax.host_gather._cost import reading_ahead_pays
from dejax.host_gather.deferred import OpenRead, deferring, open_read
from dejax.minibatch.steps._packing import Packing

__all__ = ["Between", "ReadRequest", "Split", "Whole", "split_at_reads"]

Between = list[tuple[list[Array], list[Array]]]
"""For each stage but the last, what it keeps for later ones, packed, and the rows that it asked for."""
_ANYWHERE = -1  # the stage of what each stage computes for itself: it differs between calls by the random key at most


class ReadRequest(NamedTuple):
    """A read that a stage asks for."""

    read: OpenRead
    operands: tuple[Array, ...]

    def rows(self) -> Array:
        """Reads the rows at this place of the program."""
        return self.read.gather(*self.operands)

    def start(self, before: Any) -> tuple[PendingRows, Any]:
        """Begins to read the rows after `before` is computed, as `dejax.host_gather.gather_start` does."""
        return self.read.start(*self.operands, before=before)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _SplitStage:
    """Part of a function.

    Attributes:
        inputs, outputs: variables.
        run: a function from the values of inputs to those of outputs.
        reads: the equations of the reads that come next.
        kept: variables that later stages need, without the rows of those reads.
        packing: of the values of `kept`.
    """

    inputs: list[Any]
    outputs: list[Any]
    run: Callable[..., Any]
    reads: list[Any]
    kept: list[Any]
    packing: Packing


class Split:
    """A function from values that differ between calls, cut at its reads of host memory.

    Attributes:
        depth: how many reads follow each other, each of ids that need the rows before. There are `depth + 1` stages.
    """

    def __init__(self, closed: core.ClosedJaxpr, fixed: Sequence[Array], tree: Any) -> None:
        """Cuts a jaxpr.

        Args:
            closed: the closed jaxpr of the function, whose first inputs are `fixed`.
            fixed: what does not differ between calls.
            tree: the tree of the result.
        """
        jaxpr = closed.jaxpr
        self._jaxpr, self._tree = jaxpr, tree
        self._fixed = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._fixed |= dict(zip(jaxpr.invars, fixed, strict=False))
        self._varying = jaxpr.invars[len(fixed) :]
        eqns = _used(jaxpr)
        # What follows from a random key alone is drawn again by each stage that needs it: the key passes on, not bits.
        random = {var for var in self._varying if jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key)}
        self._stage_of, self._level, self.depth = _placed(jaxpr, eqns, set(self._fixed) | random)
        self._producer = {var: eqn for eqn in eqns for var in eqn.outvars}
        self._order = {id(eqn): n for n, eqn in enumerate(eqns)}
        self._stages = self._cut()

    @property
    def pays(self) -> bool:
        """Whether a loop on a GPU gains from the cut: reads overlap, but it passes on what a stage keeps."""
        # Arrays are counted before they are packed, as when the model's constants were measured.
        ids = sum(math.prod(eqn.invars[3].aval.shape) for stage in self._stages for eqn in stage.reads)
        arrays = sum(len(stage.kept) + len(stage.reads) for stage in self._stages)
        return reading_ahead_pays(ids, arrays)

    def first(self, varying: Any) -> tuple[list[Array], list[ReadRequest]]:
        """The first stage; as `later`."""
        return self._advance(0, dict(zip(self._varying, jax.tree.leaves(varying), strict=True)))

    def later(self, number: int, kept: Sequence[Array], rows: Sequence[Array]) -> tuple[list[Array], list[ReadRequest]]:
        """Stage `number` < depth, from what the stage before kept and the rows that it asked for.

        Returns:
            What further stages need, and the reads that come next.
        """
        return self._advance(number, self._given(number, kept, rows))

    def last(self, kept: Sequence[Array], rows: Sequence[Array]) -> Any:
        """The result, by the last stage."""
        values = self._evaluate(self._stages[self.depth], self._given(self.depth, kept, rows))
        return jax.tree.unflatten(self._tree, [self._read(var, values) for var in self._jaxpr.outvars])

    def advance(self, varying: Any, between: Between) -> tuple[Any, list[tuple[list[Array], list[ReadRequest]]]]:
        """Each stage once, each for another call: the first one for `varying`.

        Args:
            varying: what differs between calls.
            between: of a call for each stage but the first, the one that has come furthest last.

        Returns:
            The result of the call that has come furthest; for the others what is kept, and the reads that come next.
        """
        result = self.last(*between[-1])
        return result, [self.first(varying), *(self.later(n + 1, *between[n]) for n in range(self.depth - 1))]

    def all(self, varying: Any) -> tuple[Between, Any]:
        """All stages, whose reads do not overlap: what each but the last keeps, with rows, and the result."""
        between = []
        kept, requests = self.first(varying)
        for number in range(1, self.depth + 1):
            rows = [request.rows() for request in requests]
            between.append((kept, rows))
            if number < self.depth:
                kept, requests = self.later(number, kept, rows)
        return between, self.last(*between[-1])

    def _given(self, number: int, kept: Sequence[Array], rows: Sequence[Array]) -> dict[Any, Any]:
        before = self._stages[number - 1]
        values = dict(zip(before.kept, before.packing.unpack(list(kept)), strict=True))
        return values | {eqn.outvars[0]: some for eqn, some in zip(before.reads, rows, strict=True)}

    def _advance(self, number: int, values: dict[Any, Any]) -> tuple[list[Array], list[ReadRequest]]:
        stage = self._stages[number]
        values = self._evaluate(stage, values)
        requests = []
        for eqn in stage.reads:
            read = open_read(eqn)
            assert read is not None
            requests.append(ReadRequest(read, tuple(self._read(var, values) for var in eqn.invars)))
        return stage.packing.pack([values[var] for var in stage.kept]), requests

    def _evaluate(self, stage: _SplitStage, values: dict[Any, Any]) -> dict[Any, Any]:
        found = stage.run(*(self._read(var, values) for var in stage.inputs))
        return values | dict(zip(stage.outputs, found, strict=True))

    def _read(self, var: Any, values: dict[Any, Any]) -> Any:
        if isinstance(var, core.Literal):
            return var.val
        return self._fixed[var] if var in self._fixed else values[var]

    def _cut(self) -> list[_SplitStage]:
        """The stages, made from the last one to the first: each leaves what the next ones need."""
        stages: list[_SplitStage] = []
        wanted, reads, kept = variables(self._jaxpr.outvars), list[Any](), list[Any]()
        for number in range(self.depth, -1, -1):
            outputs = [var for var in wanted if self._made(var, number)]
            inputs, eqns = self._part(outputs, number)
            run = jax.jit(core.jaxpr_as_fun(part(self._jaxpr, eqns, inputs, outputs)))
            stages.append(_SplitStage(inputs, outputs, run, reads, kept, Packing([var.aval for var in kept])))
            passed = [var for var in wanted if not self._made(var, number) and var not in self._fixed]
            needed = list(dict.fromkeys([*passed, *(var for var in inputs if var not in self._fixed)]))
            rows = [var for var in needed if number and self._is_read(var) and self._level[var] == number]
            reads = [self._producer[var] for var in rows]
            kept = [var for var in needed if var not in rows]
            wanted = list(dict.fromkeys([*kept, *(var for eqn in reads for var in variables(eqn.invars))]))
        return stages[::-1]

    def _is_read(self, var: Any) -> bool:
        return var in self._producer and open_read(self._producer[var]) is not None

    def _made(self, var: Any, number: int) -> bool:
        """Whether a stage computes a variable. Each computes for itself what follows from fixed inputs and keys."""
        eqn = self._producer.get(var)
        return eqn is not None and open_read(eqn) is None and self._stage_of[id(eqn)] in (number, _ANYWHERE)

    def _part(self, outputs: list[Any], number: int) -> tuple[list[Any], list[Any]]:
        """The inputs and equations by which a stage computes variables."""
        inputs, eqns = dict[Any, None](), dict[int, Any]()
        stack = list(outputs)
        while stack:
            var = stack.pop()
            if not self._made(var, number):
                inputs[var] = None
            elif id(eqn := self._producer[var]) not in eqns:
                eqns[id(eqn)] = eqn
                stack.extend(variables(eqn.invars))
        return list(inputs), sorted(eqns.values(), key=lambda eqn: self._order[id(eqn)])


class Whole:
    """A function that is not cut: one stage, with the methods of `Split` that a loop calls."""

    depth = 0

    def __init__(self, fn: Callable[[Any, Any], Any], fixed: Any) -> None:
        self._fn, self._fixed = jax.jit(fn), fixed  # traced once, although a loop and what comes before call it

    def advance(self, varying: Any, between: Between) -> tuple[Any, list[tuple[list[Array], list[ReadRequest]]]]:
        del between
        return self._fn(varying, self._fixed), []

    def all(self, varying: Any) -> tuple[Between, Any]:
        return [], self._fn(varying, self._fixed)


def split_at_reads(fn: Callable[[Any, Any], Any], varying: Any, fixed: Any, *, on_cpu: bool = False) -> Split | None:
    """Cuts a function at its reads of tables in host memory.

    Args:
        fn: (varying, fixed) -> a pytree of arrays.
        varying: a pytree of arrays like those of its calls.
        fixed: a pytree of arrays, the same for all calls.
        on_cpu: whether to cut also at reads by the CPU, which do not overlap.

    Returns:
        None for a function without such reads, or one with side effects.
    """

    def traced(fixed: Any, varying: Any) -> Any:
        with deferring(on_cpu=on_cpu):
            return fn(varying, fixed)

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(fixed, varying)
    if closed.effects:
        return None
    split = Split(closed, jax.tree.leaves(fixed), jax.tree.structure(shapes))
    return split if split.depth else None


def _used(jaxpr: core.Jaxpr) -> list[Any]:
    """The equations that the result needs, in order."""
    needed, eqns = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.update(variables(eqn.invars))
    return eqns[::-1]


def _placed(jaxpr: core.Jaxpr, eqns: list[Any], anywhere: set[Any]) -> tuple[dict[int, int], dict[Any, int], int]:
    """The stage of each equation by its id, the first stage that can use each variable, and the number of the last.

    An equation runs as soon as its operands are there, or later where then fewer bytes pass from stage to stage. What
    follows from inputs in `anywhere` alone is computed where it is needed.
    """
    level = dict.fromkeys(jaxpr.invars, 0) | dict.fromkeys(anywhere, _ANYWHERE)
    stage: dict[int, int] = {}
    for eqn in eqns:
        at = max((level[var] for var in variables(eqn.invars)), default=_ANYWHERE)
        is_read = open_read(eqn) is not None
        stage[id(eqn)] = at = max(at, 0) if is_read else at
        level.update(dict.fromkeys(eqn.outvars, at + is_read))
    depth = max(level.values(), default=0)
    users: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for var in variables(eqn.invars):
            users.setdefault(var, []).append(eqn)
    results = set(variables(jaxpr.outvars))

    def last_use(var: Any, without: Any = None) -> int:
        uses = [stage[id(eqn)] for eqn in users.get(var, ()) if eqn is not without]
        return max([*uses, *([depth] if var in results else [])], default=_ANYWHERE)

    def first_use(var: Any) -> int:
        uses = [stage[id(eqn)] for eqn in users.get(var, ())]
        return min([*uses, *([depth] if var in results else [])], default=depth)

    for eqn in reversed(eqns):
        at = stage[id(eqn)]
        if at == _ANYWHERE or open_read(eqn) is not None:
            continue
        later = min((first_use(var) for var in eqn.outvars if var in users or var in results), default=at)
        if later <= at:
            continue
        saved = sum(_bytes(var) * (later - at) for var in eqn.outvars)
        carried = (var for var in variables(eqn.invars) if level[var] != _ANYWHERE)
        added = sum(_bytes(var) * max(0, later - max(last_use(var, eqn), at)) for var in carried)
        if added <= saved:
            stage[id(eqn)] = later
            level.update(dict.fromkeys(eqn.outvars, later))
    return stage, level, depth


def _bytes(var: Any) -> int:
    aval = var.aval
    return int(aval.size) * getattr(aval.dtype, "itemsize", 8)
