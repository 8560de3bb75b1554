"""A traced function whose derivative stores the residuals in forward and fetches them in backward."""

from __future__ import annotations

import collections
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend import core

from dejax import _compat
from dejax._jaxprs import nested
from dejax.offload.activations import calls, notes, on_demand
from dejax.offload.activations.forward_mode import FORWARD_MODE, refuse_forward_mode
from dejax.offload.activations.residuals import Derivative, Residual, make_derivative

# A fast GPU computes 600 TFLOP/s in bfloat16 while the bus moves 50 GB/s; and a quarter more.
_FLOPS_PER_BYTE = 15_000
_RING_ALIGN = 512  # kAlign of native/activations/ring.cc


@dataclass(frozen=True, slots=True)
class Names:
    """The policy that stores tensors of some names."""

    names: frozenset[str]

    def __call__(self, residual: Residual) -> bool:
        return bool(self.names & residual.names)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which residuals are to be stored.

    Attributes:
        policy: whether a residual of at least `min_bytes` is stored.
        min_bytes: smaller residuals stay on the device.
        on_demand: each is stored as soon as it is computed, and fetched just before it is used; otherwise all are
            stored and fetched together, which suits one layer.
    """

    policy: Callable[[Residual], bool]
    min_bytes: int
    on_demand: bool = False

    def __call__(self, residual: Residual) -> bool:
        return residual.nbytes >= max(1, self.min_bytes) and self.wants(residual)

    def wants(self, residual: Residual) -> bool:
        """The policy's answer, whatever the size."""
        answer = self.policy(residual)
        if not isinstance(answer, (bool, np.bool_)):
            raise TypeError(
                f"offload: `policy` must return a bool for a Residual, got {answer!r}; policies of jax.checkpoint go "
                "to jax.checkpoint"
            )
        return bool(answer)

    def check_names(self, name: str, jaxpr: core.Jaxpr) -> None:
        """Raises if a name of the policy is given to no tensor of the forward pass."""
        if not isinstance(self.policy, Names):
            return
        # `offload` sees no names inside of loops and jitted functions, `region` does.
        missing = self.policy.names - set(_names(jaxpr, inside=self.on_demand))
        if missing:
            raise ValueError(
                f"offload: `policy` must have names of tensors, got {sorted(missing)[0]!r}, which no tensor of "
                f"`{name}` has; give names that checkpoint_name gives inside of it, outside of jitted functions in it"
            )


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
        name: of the function.
        jaxpr: with the constants as its first arguments.
        avals: of its arguments, constants first.
        is_activation: for each argument, whether it may leave the device.
        choice: the residuals that leave it.
        binding: of the store, as programs carry it.
    """

    def __init__(
        self,
        name: str,
        jaxpr: core.ClosedJaxpr,
        avals: Sequence[Any],
        is_activation: Sequence[bool],
        choice: Choice,
        binding: int,
    ) -> None:
        self._name = name
        self._jaxpr = jaxpr
        self._avals = list(avals)
        self._is_activation = list(is_activation)
        self._choice = choice
        self._binding = binding
        self._occurrence = _occurrence((name, *map(str, self._avals)))

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Evaluates the function, constants first."""
        call = jax.custom_vjp(self._evaluate)
        call.defvjp(self._forward, self._backward)
        try:
            return call(*map(refuse_forward_mode, operands))  # type: ignore[no-any-return]
        except TypeError as error:  # under vmap JAX refuses forward mode before our operator does
            if "forward-mode" not in str(error) or "custom_vjp" not in str(error):
                raise
            raise NotImplementedError(FORWARD_MODE) from error

    def _evaluate(self, *operands: Any) -> list[Any]:
        return core.jaxpr_as_fun(self._jaxpr)(*operands)

    @functools.cached_property
    def _derivative(self) -> Derivative:
        """How forward and backward run; made as the call is differentiated."""
        derivative = make_derivative(self._evaluate, self._avals, self._is_activation, self._choice)
        self._choice.check_names(self._name, derivative.jaxpr.jaxpr)
        notes.note_stored(self._name, derivative, self._choice)
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
                # The barrier: the function begins only once the input is copied.
                operands_now[source.argument], handed[number] = jax.lax.optimization_barrier(
                    (handed[number], put(handed[number], number))
                )
        handles: dict[int, Any] = {}
        if self._choice.on_demand:
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

        if stored and self._choice.on_demand:
            return on_demand.backward(derivative, values, cotangents, fetch, self._guard)
        if stored:
            # Not before the cotangent is there. Otherwise all tensors could come back at once.
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


def _names(jaxpr: Any, inside: bool) -> Iterator[str]:
    """What `checkpoint_name` has given to tensors, also `inside` of loops and jitted functions."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield str(eqn.params["name"])
        for inner in nested(eqn) if inside else ():
            yield from _names(inner, inside)


def ring_bytes(sizes: Sequence[int], flops: float) -> int:
    """Size of the device's ring for a function that stores tensors of these sizes and computes so many FLOP.

    A tensor leaves XLA's memory through the ring, so the ring holds one at least. Where the bus is as fast as the
    arithmetic, one call's tensors are enough. Where it is slower, forward waits as soon as the ring is full: the ring
    then holds twice as much, and eight tensors at least (docs/performance/offload.md has the measurements).
    """
    sizes = [-(-size // _RING_ALIGN) * _RING_ALIGN for size in sizes]
    total = sum(sizes)
    if flops >= _FLOPS_PER_BYTE * total:
        return total
    return max(2 * total, 8 * total // max(1, len(sizes)))
