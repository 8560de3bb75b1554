"""What a function's backward pass needs from its forward pass, and which of it leaves the device.

`jax.vjp` returns the residuals as a flat list. Here its forward pass becomes a jaxpr, which shows where each residual
comes from: an argument, a view of one, a cast, or a computed value. A residual is kept or stored as its *source*: the
smallest tensor that it is a view of. Backward makes the view again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

# Operators of one operand whose result has the same elements in another form, and is cheap to compute again.
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
        "pvary",  # the same values on each device, in shard_map
        "reduce_precision",  # jax.checkpoint puts one that changes nothing after each tensor that it saves
    )
)
_SUB_BYTE = ("int2", "uint2", "int4", "uint4", "int1", "uint1", "float4_e2m1fn")


@dataclass(frozen=True, slots=True)
class Residual:
    """A tensor that the backward pass needs and that could leave the device, as the `policy` of `offload` sees it.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        names: names that `jax.ad_checkpoint.checkpoint_name` gave to the tensor or to a view of it.
        is_input: whether the tensor is an argument of the offloaded function; otherwise the function computes it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    names: frozenset[str]
    is_input: bool

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ResidualSource:
    """A tensor that forward hands to backward.

    Attributes:
        var: its variable in the forward jaxpr.
        argument: which argument of the function it is; None: it is computed.
        stored: it goes through the store; otherwise it stays on the device.
        declined: it could be stored, but the policy does not want it.
        info: its description.
    """

    var: Any
    argument: int | None
    stored: bool
    declined: bool
    info: Residual


@dataclass(frozen=True, slots=True)
class ResidualView:
    """A residual that backward makes from a source.

    Attributes:
        source: the number of the source.
        steps: the operators between them.
    """

    source: int
    steps: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Derivative:
    """The forward and backward pass of one function, as they run with stored tensors.

    Attributes:
        jaxpr: forward: arguments -> outputs, then the computed sources.
        num_outputs: the number of outputs of the function.
        treedef: the tree structure of the `jax.vjp` function, whose leaves are the residuals.
        sources: the tensors that are handed over.
        residuals: each is a view of a source, a constant, a jaxpr that computes it (it depends on no argument), or a
            shape and dtype (backward does not use it).
        flops: the floating-point operations of the matrix products and convolutions of the forward pass, those inside
            of kernels not counted.
    """

    jaxpr: core.ClosedJaxpr
    num_outputs: int
    treedef: Any
    sources: tuple[ResidualSource, ...]
    residuals: tuple[ResidualView | np.ndarray | core.ClosedJaxpr | jax.ShapeDtypeStruct, ...]
    flops: float

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The `jax.vjp` function, from the values of the sources."""
        leaves: list[Any] = []
        for residual in self.residuals:
            if isinstance(residual, np.ndarray):
                leaves.append(residual)
            elif isinstance(residual, core.ClosedJaxpr):
                leaves += core.jaxpr_as_fun(residual)()
            elif isinstance(residual, jax.ShapeDtypeStruct):
                leaves.append(jnp.zeros(residual.shape, residual.dtype))
            else:
                value = values[residual.source]
                for eqn in residual.steps:
                    value = eqn.primitive.bind(value, **eqn.params)
                leaves.append(value)
        return jax.tree.unflatten(self.treedef, leaves)


def make_derivative(
    fn: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    is_activation: Sequence[bool],
    wanted: Callable[[Residual], bool],
) -> Derivative:
    """Traces `jax.vjp(fn, *avals)` and decides about each residual.

    Args:
        fn: a function from arrays to a list of arrays.
        avals: the shapes and dtypes of its arguments.
        is_activation: for each argument, whether it may leave the device.
        wanted: whether a tensor is to be stored.
    """
    forward = _trace_forward(fn, avals)
    chooser = _SourceChooser(forward, is_activation, wanted)
    residuals = chooser.residuals()
    return _without_unused(forward, forward.derivative(chooser.sources, residuals))


@dataclass(frozen=True, slots=True)
class _Forward:
    """The forward pass of a `jax.vjp`: arguments -> outputs, then residuals."""

    closed: core.ClosedJaxpr
    num_outputs: int
    treedef: Any

    @property
    def outputs(self) -> list[Any]:
        return self.closed.jaxpr.outvars[: self.num_outputs]

    @property
    def residuals(self) -> list[Any]:
        return self.closed.jaxpr.outvars[self.num_outputs :]

    def derivative(self, sources: Sequence[ResidualSource], residuals: Sequence[Any]) -> Derivative:
        jaxpr = self.closed.jaxpr
        computed = [source.var for source in sources if source.argument is None]
        handed_over = jaxpr.replace(
            outvars=[*self.outputs, *computed], debug_info=jaxpr.debug_info.with_unknown_names()
        )
        closed = core.ClosedJaxpr(handed_over, self.closed.consts)
        return Derivative(closed, self.num_outputs, self.treedef, tuple(sources), tuple(residuals), _flops(jaxpr))


def _trace_forward(fn: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> _Forward:
    treedef = None

    def forward(*args: Any) -> tuple[list[Any], list[Any]]:
        nonlocal treedef
        out, vjp = jax.vjp(lambda *a: list(fn(*a)), *args)
        leaves, treedef = jax.tree.flatten(vjp)
        return out, leaves

    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*avals)
    return _Forward(closed, len(shapes[0]), treedef)


class _SourceChooser:
    """Chooses the source of each residual, and whether it is stored."""

    def __init__(self, forward: _Forward, is_activation: Sequence[bool], wanted: Callable[[Residual], bool]) -> None:
        jaxpr = forward.closed.jaxpr
        self.sources: list[ResidualSource] = []
        self._forward = forward
        self._is_activation = is_activation
        self._wanted = wanted
        self._number: dict[Any, int] = {}  # variable -> number of the source that it is
        self._producer = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        self._argument_of = {var: i for i, var in enumerate(jaxpr.invars)}
        self._constants = _constants(jaxpr, jaxpr.constvars)
        self._names = self._names_of_bases()

    def residuals(self) -> list[Any]:
        """The residuals as `Derivative` holds them; fills `sources`."""
        variables = self._forward.residuals
        found: list[Any] = [self._constant(var) for var in variables]
        chains = {i: _chain(variables[i], self._producer) for i, form in enumerate(found) if form is None}
        # Short chains first: a source that they force serves the longer ones.
        for i in sorted(chains, key=lambda i: len(chains[i])):
            found[i] = self._view(variables[i], chains[i])
        return found

    def _constant(self, var: Any) -> np.ndarray | core.ClosedJaxpr | None:
        """A residual that depends on no argument."""
        if isinstance(var, core.Literal):
            aval: Any = var.aval
            return np.asarray(var.val, aval.dtype)
        # Not scalars: compilers reassociate known scalars, and plain autodiff hands them over.
        if var in self._constants and var not in self._forward.closed.jaxpr.constvars and var.aval.size > 1:
            return _maker(self._forward.closed, var)
        return None

    def _view(self, var: Any, chain: Sequence[Any]) -> ResidualView:
        path = [var, *(eqn.invars[0] for eqn in chain)]  # from the residual to its base
        shared = next((k for k in reversed(range(len(path))) if path[k] in self._number), None)
        at = self._add_source(path) if shared is None else shared
        return ResidualView(self._number[path[at]], tuple(reversed(chain[:at])))

    def _add_source(self, path: Sequence[Any]) -> int:
        """Adds one of the tensors on the path to the sources; returns its place on the path."""
        base, last = path[-1], len(path) - 1
        argument, names = self._argument_of.get(base), self._names.get(base, frozenset())
        is_kept = (argument is not None and not self._is_activation[argument]) or base in self._constants
        if is_kept or argument is not None or not _storable(base):
            info = _describe(base, names, argument is not None)
            can_go = not is_kept and _storable(base)
            stored = can_go and self._wanted(info)
            self._add(ResidualSource(base, argument, stored, can_go and not stored, info))
            return last
        # The smallest on the path; of equal ones that next to the base, which other residuals may share.
        at = min(range(len(path)), key=lambda k: (_nbytes(path[k]), -k))
        info = _describe(path[at], names, is_input=False)
        stored = _storable(path[at]) and self._wanted(info)
        declined = _storable(path[at]) and not stored
        if not stored and _nbytes(path[at]) == _nbytes(path[0]):
            at = 0  # making the view again would save nothing
            info = _describe(path[at], names, is_input=False)
        self._add(ResidualSource(path[at], self._argument_of.get(path[at]), stored, declined, info))
        return at

    def _add(self, source: ResidualSource) -> None:
        self._number[source.var] = len(self.sources)
        self.sources.append(source)

    def _names_of_bases(self) -> dict[Any, frozenset[str]]:
        """The names that a tensor or a view of it was given."""
        found: dict[Any, frozenset[str]] = {}
        for eqn in self._forward.closed.jaxpr.eqns:
            if eqn.primitive.name == "name":
                base = [eqn, *_chain(eqn.invars[0], self._producer)][-1].invars[0]
                found[base] = found.get(base, frozenset()) | {str(eqn.params["name"])}
        return found


def _without_unused(forward: _Forward, derivative: Derivative) -> Derivative:
    """The derivative without sources that backward does not use. `jax.vjp` keeps such residuals, too."""
    used = _used(derivative, [var.aval for var in forward.outputs])
    if all(used):
        return derivative
    number = list(itertools.accumulate(used, initial=0))

    def renumbered(residual: Any, var: Any) -> Any:
        if not isinstance(residual, ResidualView):
            return residual
        if not used[residual.source]:
            return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        return replace(residual, source=number[residual.source])

    sources = [source for source, needed in zip(derivative.sources, used, strict=True) if needed]
    return forward.derivative(sources, list(map(renumbered, derivative.residuals, forward.residuals)))


def _used(derivative: Derivative, outputs: Sequence[Any]) -> list[bool]:
    """For each source, whether backward uses it."""

    def backward(values: Sequence[Any], outputs: Sequence[Any]) -> Any:
        # Cotangents have the types of the outputs.
        zeros = [x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0) for x in outputs]
        return derivative.rebuild(values)(zeros)

    jaxpr = jax.make_jaxpr(backward)([source.var.aval for source in derivative.sources], outputs).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    kept = [not _storable(source.var) for source in derivative.sources]
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
    """Variables that depend on known variables only, and so on no argument: attention masks, for example.

    They are equal in each iteration of a loop. XLA would store them once, before the loop, and fetch them each time.
    """
    found = set(known)

    def is_known(var: Any) -> bool:
        return isinstance(var, core.Literal) or var in found

    for eqn in jaxpr.eqns:
        if eqn.effects:  # a callback or a read of a reference may return another value the next time
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
    """A jaxpr that computes a variable that depends on no argument."""
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
        if eqn.primitive.name == "convert_element_type" and _is_of_extended_dtype(eqn):
            break
        if eqn.primitive.name == "reduce_precision" and not _keeps_all_bits(eqn):
            break
        chain.append(eqn)
        var = eqn.invars[0]
    return chain


def _is_of_extended_dtype(eqn: Any) -> bool:
    # Random keys, for example, whose bytes are not the array's.
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
        return False  # partial sums, to be added later: copies would be added once more
    return aval.dtype.name not in _SUB_BYTE and 0 not in aval.shape


def _describe(var: Any, names: frozenset[str], is_input: bool) -> Residual:
    aval = var.aval
    dtype = np.dtype(aval.dtype) if _storable(var) else np.dtype(np.uint8)
    return Residual(tuple(getattr(aval, "shape", ())), dtype, names, is_input)
