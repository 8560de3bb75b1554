"""Whether an Optax transformation may update the layers of a stack one by one.

The update of the whole model is traced for a small tree: the parameters outside of the stack and two layers. For each
run of elements of each value in the trace it is then known which of these three the run depends on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from dejax._jaxprs import nested, part, variables
from dejax.offload._evaluation import inlined, is_elementwise

Labels = frozenset[int]
Runs = tuple[tuple[int, Labels], ...]
"""What a value depends on: runs of elements in row-major order, each as (number of elements, labels of inputs)."""
_NOTHING: Labels = frozenset()
_ROW_MAJOR = frozenset(("reshape", "squeeze", "expand_dims", "copy", "copy_p"))  # results have their operand's elements


def why_not_by_layers(tx: Any, outer: Any, layer: Any) -> str | None:
    """Why the updates of a model and those of its layers by themselves differ; None where they are equal.

    Args:
        tx: the transformation.
        outer: shapes of the trained parameters outside of the stack.
        layer: shapes of the trained parameters of one layer.

    Raises:
        ValueError: the transformation can be traced for no tree of several layers.
    """
    whole = {"outer": outer, "layers": [layer, layer]}
    labels = jax.tree.leaves({"outer": _labelled(outer, 0), "layers": [_labelled(layer, 1), _labelled(layer, 2)]})
    # Masks and labels by names of one layer fit the second tree alone; those by paths may differ in it.
    pairs = jax.tree.map(lambda x: [x, x], layer)
    failed: list[Exception] = []
    for tree, group in ((whole, labels), (pairs, [1, 2] * len(jax.tree.leaves(layer)))):
        try:
            update, start = _traced(tx, tree, group)
        except Exception as error:  # the user's code, given another tree than it may expect
            failed.append(error)
            continue
        if _draws(update.jaxpr):
            return (
                "draws random numbers, which would be the same in every layer; add noise to gradients in `body` and "
                "`head`"
            )
        if _mixes(update, start, group):
            return (
                "mixes them (a norm of all gradients, or whether all are finite); in place of "
                "optax.clip_by_global_norm give clip_norm=, leave out optax.apply_if_finite because steps without "
                "finite gradients are skipped, or use plain autodiff with offload.optimizer"
            )
    if len(failed) < 2:
        return None
    _traced(tx, layer, [1] * len(jax.tree.leaves(layer)))  # an error that the layer itself makes is the user's to read
    raise ValueError(
        "stack_step: `tx` must update trees of any structure, such as that of two layers, which shows whether it mixes "
        f"layers, got {type(failed[-1]).__name__}: {failed[-1]}; write it with jax.tree.map"
    ) from failed[-1]


def dependences(jaxpr: core.Jaxpr, given: Sequence[Runs]) -> list[Runs]:
    """The groups of parameters on which each result of a jaxpr depends, given those of its arguments."""
    known: dict[Any, Runs] = dict(zip(jaxpr.invars, given, strict=True))

    def read(var: Any) -> Runs:
        return _uniform(var, _NOTHING) if isinstance(var, core.Literal) or var not in known else known[var]

    for eqn in jaxpr.eqns:
        found = _of_elements(eqn, [read(v) for v in eqn.invars])
        if found is None:  # a loop, a branch, a sum: its results depend on the operands that JAX's own rules keep
            inputs = variables(eqn.invars)
            found = []
            for var in eqn.outvars:
                _, used = partial_eval.dce_jaxpr(part(jaxpr, [eqn], inputs, [var]).jaxpr, [True])
                found.append(_uniform(var, _all(run for v in itertools.compress(inputs, used) for run in read(v))))
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _labelled(tree: Any, label: int) -> Any:
    return jax.tree.map(lambda _: label, tree)


def _traced(tx: Any, params: Any, labels: Sequence[int]) -> tuple[core.ClosedJaxpr, list[Runs]]:
    """The traced update of gradients, state and parameters, and the groups on which its arguments depend at first."""
    init, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    init = inlined(init)
    update = inlined(jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(params, state, params))
    own = [((x.size, frozenset((label,))),) for x, label in zip(jax.tree.leaves(params), labels, strict=True)]
    return update, [*own, *dependences(init.jaxpr, own), *own]


def _mixes(update: core.ClosedJaxpr, given: list[Runs], labels: Sequence[int]) -> bool:
    """Whether an update depends on another group of parameters, through the state of earlier steps, too."""
    count, state = len(labels), len(given) - 2 * len(labels)
    while True:
        results = dependences(update.jaxpr, given)
        later = [_joined(pair) for pair in zip(given[count : count + state], results[count:], strict=True)]
        if later == given[count : count + state]:
            break
        given = [*given[:count], *later, *given[count + state :]]
    # Those outside of the stack have one label: they are updated together, so they may depend on each other.
    return any(_all(runs) - {label} for runs, label in zip(results[:count], labels, strict=True))


def _draws(jaxpr: core.Jaxpr) -> bool:
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    if "threefry2x32" in names or any(name.startswith(("random_bits", "random_split", "rng_")) for name in names):
        return True
    return any(_draws(inner) for eqn in jaxpr.eqns for inner in nested(eqn))


def _of_elements(eqn: Any, given: list[Runs]) -> list[Runs] | None:
    """Dependences of an equation that moves elements, or computes each from the elements at its place."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    if name in _ROW_MAJOR:
        return [given[0]]
    if is_elementwise(eqn, getattr(out, "shape", ())):
        wide = [runs for v, runs in zip(eqn.invars, given, strict=True) if v.aval.shape == out.shape]
        scalars = _all(run for v, runs in zip(eqn.invars, given, strict=True) if v.aval.shape == () for run in runs)
        return [tuple((size, own | scalars) for size, own in _joined(wide))]
    if name == "concatenate" and params["dimension"] == 0:
        return [_merged([run for runs in given for run in runs])]
    if name == "slice" and params["strides"] is None and out.shape[1:] == eqn.invars[0].aval.shape[1:] and out.ndim:
        row = out.size // max(1, out.shape[0])
        return [_part(given[0], params["start_indices"][0] * row, params["limit_indices"][0] * row)]
    if name == "split" and params["axis"] == 0:
        ends = list(itertools.accumulate((var.aval.size for var in eqn.outvars), initial=0))
        return [_part(given[0], begin, end) for begin, end in itertools.pairwise(ends)]
    return None


def _uniform(var: Any, labels: Labels) -> Runs:
    return ((getattr(var.aval, "size", 1), labels),)


def _all(runs: Iterable[tuple[int, Labels]]) -> Labels:
    return _NOTHING.union(*(labels for _, labels in runs))


def _merged(runs: Sequence[tuple[int, Labels]]) -> Runs:
    """Merges neighbouring runs of elements that depend on the same groups."""
    found: list[tuple[int, Labels]] = []
    for size, labels in runs:
        if found and found[-1][1] == labels:
            found[-1] = (found[-1][0] + size, labels)
        elif size or not found:
            found.append((size, labels))
    return tuple(found)


def _part(runs: Runs, begin: int, end: int) -> Runs:
    found, at = [], 0
    for size, labels in runs:
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            found.append((high - low, labels))
        at += size
    return tuple(found) or ((0, _NOTHING),)


def _joined(several: Sequence[Runs]) -> Runs:
    """Dependences of elements that are computed from the elements at the same place of several values."""
    ends = sorted({end for runs in several for end in itertools.accumulate(size for size, _ in runs)})
    parts = zip([0, *ends], ends, strict=False)
    return _merged([(e - b, _NOTHING.union(*(_all(_part(r, b, e)) for r in several))) for b, e in parts]) or (
        (0, _NOTHING),
    )
