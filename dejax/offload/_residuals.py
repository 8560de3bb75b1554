"""What a function's backward pass needs from its forward pass, and which of it leaves the device.

`jax.vjp` gives the residuals as a flat list. Here its forward pass becomes a jaxpr, so that for each residual one can
see where it comes from: an argument, a view of one, a cast, or something computed. A residual is kept or stored as its
*source*: the smallest tensor that it is a view of; backward makes the view again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

# Operators of one operand whose result is the same numbers in another form, and cheap to make again.
_VIEWS = frozenset(
    (
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "name",
        "rev",
        "pvary",  # the same number on each device, in shard_map
        "reduce_precision",  # jax.checkpoint puts one that changes nothing after each tensor that it saves
    )
)
_SUB_BYTE = ("int2", "uint2", "int4", "uint4", "int1", "uint1", "float4_e2m1fn")


@dataclass(frozen=True, slots=True)
class Residual:
    """A tensor that could leave the device, as a policy sees it.

    Attributes:
        shape: of the tensor.
        dtype: likewise.
        names: given with `jax.ad_checkpoint.checkpoint_name` to it or to a view of it.
        is_input: it is an argument of the function (an activation that came in), not computed inside.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    names: frozenset[str]
    is_input: bool

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that forward hands to backward.

    Attributes:
        var: in the forward jaxpr.
        argument: which argument of the function it is; None where it is computed.
        stored: it goes through the store; otherwise it stays on the device.
        declined: it could be stored, and is not wanted.
        info: its description.
    """

    var: Any
    argument: int | None
    stored: bool
    declined: bool
    info: Residual


@dataclass(frozen=True, slots=True)
class Plan:
    """How forward and backward of one function go.

    Attributes:
        jaxpr: forward: arguments -> outputs, then the sources that are computed inside.
        num_outputs: of the function.
        treedef: of the `jax.vjp` function, whose leaves are the residuals.
        sources: what is handed over.
        residuals: for each residual the number of its source and the operators that make it again; or a constant; or
            what makes it, where that depends on no argument; or its shape and dtype, where backward has no use for it.
        flops: of the matrix products and convolutions of the forward pass, as far as they can be seen.
    """

    jaxpr: core.ClosedJaxpr
    num_outputs: int
    treedef: Any
    sources: tuple[Source, ...]
    residuals: tuple[tuple[int, tuple[Any, ...]] | np.ndarray | core.ClosedJaxpr | jax.ShapeDtypeStruct, ...]
    flops: float

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The `jax.vjp` function, from the values of the sources."""
        leaves: list[Any] = []
        for residual in self.residuals:
            if isinstance(residual, np.ndarray):
                leaves.append(residual)
                continue
            if isinstance(residual, core.ClosedJaxpr):
                leaves += core.jaxpr_as_fun(residual)()
                continue
            if isinstance(residual, jax.ShapeDtypeStruct):
                leaves.append(jnp.zeros(residual.shape, residual.dtype))
                continue
            number, views = residual
            value = values[number]
            for eqn in views:
                value = eqn.primitive.bind(value, **eqn.params)
            leaves.append(value)
        return jax.tree.unflatten(self.treedef, leaves)


def make_plan(
    fn: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    is_activation: Sequence[bool],
    wanted: Callable[[Residual], bool],
) -> Plan:
    """Traces `jax.vjp(fn, *avals)` and decides about each residual.

    Args:
        fn: from arrays to a list of arrays.
        avals: of its arguments.
        is_activation: for each argument, whether it may leave the device.
        wanted: whether a tensor is to be stored.
    """
    treedef = None

    def forward(*args: Any) -> tuple[list[Any], list[Any]]:
        nonlocal treedef
        out, vjp = jax.vjp(lambda *a: list(fn(*a)), *args)
        leaves, treedef = jax.tree.flatten(vjp)
        return out, leaves

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*avals)
    jaxpr = closed.jaxpr
    num_outputs = len(shapes[0])
    outputs, residual_vars = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    producer = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    argument_of = {var: i for i, var in enumerate(jaxpr.invars)}
    constants = _constants(jaxpr, jaxpr.constvars)
    names_of: dict[Any, frozenset[str]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            named = [eqn, *_chain(eqn.invars[0], producer)]
            base = named[-1].invars[0]
            names_of[base] = names_of.get(base, frozenset()) | {str(eqn.params["name"])}

    chains = [None if isinstance(var, core.Literal) else _chain(var, producer) for var in residual_vars]
    made_again: dict[int, core.ClosedJaxpr] = {}
    for i, var in enumerate(residual_vars):
        # Not scalars: compilers reassociate what they know, and plain autodiff hands them over.
        if chains[i] is not None and var in constants and var not in jaxpr.constvars and var.aval.size > 1:
            made_again[i] = _maker(closed, var)
            chains[i] = None
    sources: list[Source] = []
    number: dict[Any, int] = {}

    def add(var: Any, stored: bool, declined: bool, info: Residual) -> int:
        if var not in number:
            number[var] = len(sources)
            sources.append(Source(var, argument_of.get(var), stored, declined, info))
        return number[var]

    chosen: dict[int, tuple[int, tuple[Any, ...]]] = {}
    # Short chains first: what they force to be stored serves the longer ones.
    for i in sorted((i for i, chain in enumerate(chains) if chain is not None), key=lambda i: len(chains[i] or ())):
        chain = chains[i] or []
        steps = [residual_vars[i], *[eqn.invars[0] for eqn in chain]]  # from the residual to its base
        base = steps[-1]
        names = names_of.get(base, frozenset())
        argument = argument_of.get(base)
        info = _describe(base, names, argument is not None)
        stays = (argument is not None and not is_activation[argument]) or base in constants or not _storable(base)
        declined = False
        taken = next((k for k in range(len(steps) - 1, -1, -1) if steps[k] in number), None)
        if taken is not None:
            at = taken
        elif stays:
            at = len(steps) - 1
        elif argument is not None:
            at = len(steps) - 1
            stays = declined = not wanted(info)
        else:
            # The smallest on the way; of equals the one next to the base, which others may share.
            at = min(range(len(steps)), key=lambda k: (_nbytes(steps[k]), -k))
            info = _describe(steps[at], names, False)
            declined = _storable(steps[at]) and not wanted(info)
            stays = declined or not _storable(steps[at])
            if stays and _nbytes(steps[at]) == _nbytes(steps[0]):
                at = 0  # nothing is gained by making it again
                info = _describe(steps[at], names, False)
        chosen[i] = (add(steps[at], not stays, declined, info), tuple(reversed(chain[:at])))

    residuals = tuple(
        made_again[i]
        if i in made_again
        else chosen[i]
        if chain is not None
        else np.asarray(getattr(residual_vars[i], "val", 0), residual_vars[i].aval.dtype)
        for i, chain in enumerate(chains)
    )

    def plan(sources: Sequence[Source], residuals: Sequence[Any]) -> Plan:
        computed = [source.var for source in sources if source.argument is None]
        debug_info = jaxpr.debug_info.with_unknown_names()
        handed_over = core.ClosedJaxpr(
            jaxpr.replace(outvars=[*outputs, *computed], debug_info=debug_info), closed.consts
        )
        return Plan(handed_over, num_outputs, treedef, tuple(sources), tuple(residuals), _flops(jaxpr))

    everything = plan(sources, residuals)
    used = _used(everything, [var.aval for var in outputs])
    if all(used):
        return everything
    place = list(itertools.accumulate(used, initial=0))
    return plan(
        [source for source, needed in zip(sources, used, strict=True) if needed],
        [
            residual
            if not isinstance(residual, tuple)
            else (place[residual[0]], residual[1])
            if used[residual[0]]
            else jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
            for residual, var in zip(residuals, residual_vars, strict=True)
        ],
    )


def _used(plan: Plan, outputs: Sequence[Any]) -> list[bool]:
    """Which sources backward uses: `jax.vjp` keeps some that no cotangent depends on."""

    def backward(values: Sequence[Any], outputs: Sequence[Any]) -> Any:
        # Cotangents are as their outputs are, as far as types go.
        zeros = [x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0) for x in outputs]
        return plan.rebuild(values)(zeros)

    jaxpr = jax.make_jaxpr(backward)([source.var.aval for source in plan.sources], outputs).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    kept = [not _storable(source.var) for source in plan.sources]
    return [a or b for a, b in zip(used, kept, strict=False)]


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = np.prod([eqn.invars[0].aval.shape[d] for d in contracted], dtype=np.float64)
            total += 2 * depth * np.prod(eqn.outvars[0].aval.shape, dtype=np.float64)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
            features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * np.prod(kernel, dtype=np.float64) / features * np.prod(out, dtype=np.float64)
        else:
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    total += eqn.params.get("length", 1) * _flops(inner)
    return float(total)


def _constants(jaxpr: core.Jaxpr, known: Iterable[Any]) -> set[Any]:
    """Variables that depend on known ones alone, and so on no argument: masks of attention, say.

    They are the same in each turn of a loop. XLA would store them once, before the loop, and fetch them in each turn.
    """
    found = set(known)

    def is_known(var: Any) -> bool:
        return isinstance(var, core.Literal) or var in found

    for eqn in jaxpr.eqns:
        if eqn.effects:  # a callback or a read of a reference may give something else the next time
            continue
        if all(is_known(v) for v in eqn.invars):
            found.update(eqn.outvars)
        elif eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"].jaxpr
            pairs = zip(inner.invars, eqn.invars, strict=True)
            inside = _constants(inner, [*inner.constvars, *(own for own, given in pairs if is_known(given))])
            results = zip(eqn.outvars, inner.outvars, strict=True)
            found.update(out for out, own in results if isinstance(own, core.Literal) or own in inside)
    return found


def _maker(closed: core.ClosedJaxpr, var: Any) -> core.ClosedJaxpr:
    """What computes a variable that depends on no argument."""
    jaxpr = closed.jaxpr.replace(outvars=[var], debug_info=closed.jaxpr.debug_info.with_unknown_names())
    needed, used = partial_eval.dce_jaxpr(jaxpr, [True])
    assert not any(used)
    return core.ClosedJaxpr(needed, closed.consts)


def _chain(var: Any, producer: dict[Any, Any]) -> list[Any]:
    """The views that lead to `var`, the last one first."""
    chain = []
    while (eqn := producer.get(var)) is not None and eqn.primitive.name in _VIEWS:
        arrays = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        if len(eqn.invars) != 1 or len(arrays) != 1:
            break
        if eqn.primitive.name == "convert_element_type" and _rounds_in_ways(eqn):
            break
        if eqn.primitive.name == "reduce_precision" and not _keeps_all_bits(eqn):
            break
        chain.append(eqn)
        var = eqn.invars[0]
    return chain


def _rounds_in_ways(eqn: Any) -> bool:
    # Keys and the like have no bytes of their own.
    return any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in (*eqn.invars, *eqn.outvars))


def _keeps_all_bits(eqn: Any) -> bool:
    info = jax.numpy.finfo(eqn.invars[0].aval.dtype)
    return eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant


def _nbytes(var: Any) -> int:
    aval = var.aval
    return int(np.prod(aval.shape, dtype=np.int64)) * np.dtype(aval.dtype).itemsize if _storable(var) else 0


def _storable(var: Any) -> bool:
    aval = var.aval
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return False
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) or aval.dtype == jax.dtypes.float0:
        return False
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return False  # parts of a sum that is still to be made: a copy of each would be summed once more
    return aval.dtype.name not in _SUB_BYTE and 0 not in aval.shape


def _describe(var: Any, names: frozenset[str], is_input: bool) -> Residual:
    aval = var.aval
    dtype = np.dtype(aval.dtype) if _storable(var) else np.dtype(np.uint8)
    return Residual(tuple(getattr(aval, "shape", ())), dtype, names, is_input)
