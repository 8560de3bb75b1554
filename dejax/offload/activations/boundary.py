"""A traced function whose derivative stores the residuals in forward and fetches them in backward."""

from __future__ import annotations

import collections
import functools
import hashlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from dejax import _compat
from dejax._jaxprs import nested
from dejax.offload.activations import calls, notes, on_demand
from dejax.offload.activations.options import OffloadOptions
from dejax.offload.activations.residuals import Derivative, make_derivative

# A fast GPU computes 600 TFLOP/s in bfloat16 while the bus moves 50 GB/s; 1.25 is a margin.
_FLOPS_PER_BYTE = 15_000
_RING_ALIGN = 512  # kAlign of native/activations/ring.cc


_counts: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = weakref.WeakKeyDictionary()
_counts_lock = threading.Lock()


def _occurrence(described: tuple[str, ...]) -> int:
    """How often the program that is being traced has called a function of this description before.

    Outside of programs it is 0.
    """
    trace = _compat.staging_trace()
    if trace is None:
        return 0
    with _counts_lock:
        counts = _counts.setdefault(trace, collections.Counter())
        counts[described] += 1
        return counts[described] - 1


class Boundary:
    """One call of an offloaded function, traced, with its derivative. It holds no tracer and no array of its caller.

    Args:
        name: the name of the function.
        jaxpr: with the constants as its first arguments.
        avals: the shapes and dtypes of its arguments, constants first.
        is_activation: for each argument, whether it may leave the device.
        options: which residuals leave it.
        binding: the number by which programs find the store.
    """

    def __init__(
        self,
        name: str,
        jaxpr: core.ClosedJaxpr,
        avals: Sequence[Any],
        is_activation: Sequence[bool],
        options: OffloadOptions,
        binding: int,
    ) -> None:
        self._name = name
        self._jaxpr = jaxpr
        self._avals = list(avals)
        self._is_activation = list(is_activation)
        self._options = options
        self._binding = binding
        self._occurrence = _occurrence((name, *map(str, self._avals)))

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Evaluates the function, constants first."""
        call = jax.custom_vjp(self._evaluate)
        call.defvjp(self._forward, self._backward)
        try:
            return call(*map(_refuse_forward_mode, operands))  # type: ignore[no-any-return]
        except TypeError as error:  # under vmap JAX refuses forward mode before our operator does
            if "forward-mode" not in str(error) or "custom_vjp" not in str(error):
                raise
            raise NotImplementedError(_FORWARD_MODE) from error

    def _evaluate(self, *operands: Any) -> list[Any]:
        return core.jaxpr_as_fun(self._jaxpr)(*operands)

    @functools.cached_property
    def _derivative(self) -> Derivative:
        """How forward and backward run; made as the call is differentiated."""
        derivative = make_derivative(self._evaluate, self._avals, self._is_activation, self._options)
        self._options.check_names(self._name, derivative.jaxpr.jaxpr)
        notes.note_stored(self._name, derivative, self._options)
        return derivative

    @functools.cached_property
    def _sites(self) -> list[int]:
        """The number of the store call and the fetch call of each source; 0: it is not stored.

        It is the same in every process that traces this function.
        """
        sources = self._derivative.sources
        described: list[Any] = [self._name, [str(aval) for aval in self._avals]]
        described.append(list(_primitives(self._derivative.jaxpr.jaxpr)))
        described.append([(source.info.shape, source.info.dtype.name, source.stored) for source in sources])
        digest = hashlib.blake2b(repr(described).encode(), digest_size=16).digest()
        return [_site(digest, self._occurrence, n) if source.stored else 0 for n, source in enumerate(sources)]

    def _forward(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """(operands) -> (outputs, the sources: handles of those that are stored, tensors of the others)."""
        derivative = self._derivative
        sizes = [source.info.nbytes for source in derivative.sources if source.stored]
        ring = ring_bytes(sizes, derivative.flops)

        def put(x: Array, number: int) -> Array:
            return calls.store(x, binding=self._binding, site=self._sites[number], ring_bytes=ring)

        operands_now = list(operands)
        handed: dict[int, Any] = {}
        for number, source in enumerate(derivative.sources):
            if source.argument is None:
                continue
            handed[number] = operands_now[source.argument]
            if source.stored:
                # Because of the barrier the function begins only after its input is copied.
                operands_now[source.argument], handed[number] = jax.lax.optimization_barrier(
                    (handed[number], put(handed[number], number))
                )
        handles: dict[int, Any] = {}
        if self._options.on_demand:
            values = on_demand.forward(derivative, operands_now, put, handles)
        else:
            values = core.jaxpr_as_fun(derivative.jaxpr)(*operands_now)
        out, computed = values[: derivative.num_outputs], iter(values[derivative.num_outputs :])
        for number, source in enumerate(derivative.sources):
            if source.argument is None:
                handed[number] = next(computed)
                if source.stored and number not in handles:
                    handles[number] = put(handed[number], number)
        if handles:
            # What follows waits for the copies. Otherwise XLA's scheduler could keep all tensors until the end.
            out, handles = jax.lax.optimization_barrier((out, handles))
            handed.update(handles)
        return out, [handed[number] for number in range(len(derivative.sources))]

    def _backward(self, handed: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        """(sources as `forward` returns them, cotangents of the outputs) -> cotangents of the operands."""
        derivative = self._derivative
        stored = [number for number, source in enumerate(derivative.sources) if source.stored]
        arrays = [i for i, ct in enumerate(cotangents) if on_demand.is_array(ct)]
        values = list(handed)

        def fetch(number: int, handle: Array, after: Sequence[Array]) -> Array:
            like = derivative.sources[number].var.aval
            return calls.fetch(handle, like, after, binding=self._binding, site=self._sites[number])

        if stored and self._options.on_demand:
            return on_demand.backward(derivative, values, cotangents, fetch, self._guard)
        if stored:
            # Fetches wait for the cotangent. Otherwise all tensors could come back at once.
            waited, handles = jax.lax.optimization_barrier(
                ([cotangents[i] for i in arrays], [handed[number] for number in stored])
            )
            cotangents = list(cotangents)
            for i, ct in zip(arrays, waited, strict=True):
                cotangents[i] = ct
            for number, handle in reversed(list(zip(stored, handles, strict=True))):
                values[number] = fetch(number, handle, waited[:1])
            if blind := [
                values[number] for number in stored if not calls.has_nan(derivative.sources[number].info.dtype)
            ]:
                for i in arrays:
                    cotangents[i] = self._guard(cotangents[i], blind)
        return tuple(derivative.rebuild(values)(cotangents))

    def _guard(self, x: Array, after: Sequence[Array]) -> Array:
        return calls.guard(x, after, binding=self._binding)


def _site(digest: bytes, occurrence: int, number: int) -> int:
    hashed = hashlib.blake2b(digest + b"%d %d" % (occurrence, number), digest_size=8).digest()
    return int.from_bytes(hashed, "little") >> 2  # positive, and not 0


def _primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in nested(eqn):
            yield from _primitives(inner)


def ring_bytes(sizes: Sequence[int], flops: float) -> int:
    """Size of the device's ring for a function that stores tensors of these sizes and computes `flops` operations.

    A tensor leaves XLA's memory through the ring, so the ring holds one at least. Where the bus is as fast as the
    arithmetic, one call's tensors are enough. Where it is slower, forward waits as soon as the ring is full: the ring
    then holds twice as much, and eight tensors at least (docs/performance/offload.md has the measurements).
    """
    sizes = [-(-size // _RING_ALIGN) * _RING_ALIGN for size in sizes]
    total = sum(sizes)
    if flops >= _FLOPS_PER_BYTE * total:
        return total
    return max(2 * total, 8 * total // max(1, len(sizes)))


# JAX implements reverse mode as forward mode that is transposed before it runs. So the tangents of an offloaded
# function's arguments go through a linear operator that can be transposed, but raises when it is evaluated: forward
# mode raises an error that names the remedy, not JAX's about `custom_vjp`.

_tangent = core.Primitive("offload_tangent")
_FORWARD_MODE = (
    "offload: forward mode was asked for (jax.jvp, jacfwd, hessian, linearize, also through a while_loop), but stored "
    "tensors come back in reverse mode only. Use the function without offload there, or take jax.checkpoint; for "
    "reverse mode through a loop use scan, or fori_loop with fixed bounds"
)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(_FORWARD_MODE)


_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent] = lambda args, dims: (_tangent.bind(*args), dims[0])


@jax.custom_jvp
def _marked(x: Any) -> Any:
    return x


@_marked.defjvp
def _marked_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], _tangent.bind(tangents[0])


def _refuse_forward_mode(x: Any) -> Any:
    """Returns `x` with a tangent that can be transposed but not evaluated."""
    return _marked(x) if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) else x
