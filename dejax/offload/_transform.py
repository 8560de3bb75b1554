"""`offload`: a function whose backward pass finds its residuals in an `ActivationStore`."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax import Array
from jax.extend import core

from dejax.offload import _calls
from dejax.offload._residuals import Plan, Residual, make_plan
from dejax.offload._store import ActivationStore, store_id

F = TypeVar("F", bound=Callable[..., Any])
Policy = Callable[[Residual], bool]
Inputs = Literal["auto", "all", "none"] | int | Sequence[int]

MIN_BYTES = 1 << 20
# What a fast GPU computes (600 TFLOP/s in bfloat16) while the bus moves a byte (50 GB/s), and a quarter more.
_FLOPS_PER_BYTE = 15_000
_RING_ALIGN = 512  # kAlign of native/offload/ring.cc
# One number for each tensor that a trace stores: forward and backward of it share the number.
_sites = itertools.count(1)


def offload(
    fn: F,
    *,
    policy: Policy | Iterable[str] | None = None,
    store: ActivationStore | Literal["device"] | None = None,
    inputs: Inputs = "auto",
    min_bytes: int = MIN_BYTES,
    static_argnums: int | Sequence[int] = (),
) -> F:
    """Offload what `fn` keeps for its backward pass: `jax.checkpoint`'s shape, but moved instead of computed again.

    The result computes what `fn` computes. Its gradients are those of the same program with the tensors left on the
    device, `store="device"`, bit for bit, and those of `fn` to rounding: XLA may fuse, and so round, elsewhere. Between
    forward and backward the residuals of `min_bytes` or more are in the store: on the device's ring, in host memory or
    on disk. Parameters and other arguments stay where they are; equal tensors and views of one tensor are stored once;
    a tensor that is a cast or a view is stored in the form that is smallest. Works under `jit`, `scan`, `vmap`,
    `shard_map`, gradient accumulation, inside and around `jax.checkpoint`: `offload(jax.checkpoint(fn))` stores only
    the inputs of `fn` and computes the rest again.

    Args:
        fn: a function of pytrees of arrays, to a pytree of arrays.
        policy: which residuals to store: names given with `jax.ad_checkpoint.checkpoint_name`, or a function from a
            `Residual` to a bool. None: every one.
        store: where to. None: the store that is current when the step runs (`with ActivationStore(...)`), or a store of
            host memory that lives as long as the process. "device": nowhere, everything stays; the program is cut in
            the same places, so that its numbers are those of the offloaded one, bit for bit.
        inputs: which arguments are activations, so that they may be stored too, where backward needs them. "auto": each
            array with the shape and dtype of one of the outputs, as a layer's input has (of several, the last one);
            "all"; "none"; or positions. The others (parameters, tables) stay.
        min_bytes: smaller tensors stay on the device.
        static_argnums: positions of arguments that are not arrays, as in `jax.jit`.

    Raises:
        NotImplementedError: at trace time, where a second derivative is taken through it.
        ValueError: `inputs` names no argument, or is another word.
        NativeExtensionError: the extension is not there.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.offload import ActivationStore, offload
    >>> layer = offload(lambda w, x: jnp.tanh(x @ w), min_bytes=0)
    >>> with ActivationStore() as store:
    ...     gradient = jax.grad(lambda w: layer(w, jnp.ones((2, 3))).sum())(jnp.eye(3))
    >>> gradient.shape
    (3, 3)
    """
    return _offload(fn, policy, store, inputs, min_bytes, static_argnums, kept_argnums=())


def _offload(
    fn: F,
    policy: Policy | Iterable[str] | None,
    store: ActivationStore | Literal["device"] | None,
    inputs: Inputs,
    min_bytes: int,
    static_argnums: int | Sequence[int],
    kept_argnums: Sequence[int],
) -> F:
    choose = _as_function(policy)
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    def wanted(residual: Residual) -> bool:
        return residual.nbytes >= max(1, min_bytes) and choose(residual)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fixed = {i % len(args): args[i] for i in static if -len(args) <= i < len(args)}
        moving = [arg for i, arg in enumerate(args) if i not in fixed]
        leaves, treedef = jax.tree.flatten((moving, kwargs))
        _check_leaves(leaves)

        def flat(*leaves: Any) -> Any:
            moving, kwargs = jax.tree.unflatten(treedef, leaves)
            rest = iter(moving)
            return fn(*[fixed[i] if i in fixed else next(rest) for i in range(len(args))], **kwargs)

        # Tracing makes what `fn` closes over (parameters of a model, say) arguments like the others.
        closed, out_shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        outputs, out_tree = jax.tree.flatten(out_shape)
        positions = [i for i in range(len(args)) if i not in fixed]
        owner = [
            *itertools.chain.from_iterable(
                [i] * len(jax.tree.leaves(arg)) for i, arg in zip(positions, moving, strict=True)
            )
        ]
        owner += [-1] * (len(leaves) - len(owner))  # keyword arguments have no position
        activation = _activations(inputs, len(args), closed.in_avals, owner, outputs, kept_argnums)
        flags = [False] * len(closed.consts) + activation
        out = _call(closed, flags, wanted, store_id(store), [*closed.consts, *leaves])
        return jax.tree.unflatten(out_tree, out)

    return wrapped  # type: ignore[return-value]


def _call(
    closed: core.ClosedJaxpr, is_activation: list[bool], wanted: Policy, identity: int, operands: list[Any]
) -> list[Any]:
    """Evaluates a traced function, constants first among its operands, with a derivative that uses the store."""
    num_consts = len(closed.consts)

    def evaluate(*operands: Any) -> list[Any]:
        open_jaxpr = core.ClosedJaxpr(closed.jaxpr, operands[:num_consts])
        return core.jaxpr_as_fun(open_jaxpr)(*operands[num_consts:])

    @functools.cache  # forward may be traced more than once, backward takes the same plan and sites
    def planned() -> tuple[Plan, list[int]]:
        plan = make_plan(evaluate, [jax.typeof(x) for x in operands], is_activation, wanted)
        return plan, [next(_sites) if source.stored else 0 for source in plan.sources]

    def forward(*operands: Any) -> tuple[list[Any], list[Any]]:
        plan, sites = planned()
        sizes = [source.info.nbytes for source in plan.sources if source.stored]
        ring = ring_bytes(sizes, plan.flops)

        def put(x: Array, site: int) -> Array:
            return _calls.store(x, store_id=identity, site=site, ring_bytes=ring)

        operands_now = list(operands)
        handed: dict[int, Any] = {}
        for number, (source, site) in enumerate(zip(plan.sources, sites, strict=True)):
            if source.argument is None:
                continue
            handed[number] = operands_now[source.argument]
            if source.stored:
                # The barrier lets the function's own work begin only when the input has been taken.
                operands_now[source.argument], handed[number] = jax.lax.optimization_barrier(
                    (handed[number], put(handed[number], site))
                )
        values = core.jaxpr_as_fun(plan.jaxpr)(*operands_now)
        out, computed = values[: plan.num_outputs], iter(values[plan.num_outputs :])
        handles = {}
        for number, (source, site) in enumerate(zip(plan.sources, sites, strict=True)):
            if source.argument is None:
                handed[number] = next(computed)
                if source.stored:
                    handles[number] = put(handed[number], site)
        if handles:
            # What comes next waits until all is taken: XLA's scheduler would else be free to keep it all until the end.
            out, handles = jax.lax.optimization_barrier((out, handles))
            handed.update(handles)
        return out, [handed[number] for number in range(len(plan.sources))]

    def backward(handed: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        plan, sites = planned()
        stored = [number for number, source in enumerate(plan.sources) if source.stored]
        arrays = [i for i, ct in enumerate(cotangents) if _is_array(ct)]
        values = list(handed)
        if stored:
            # Not before the cotangent is there: otherwise all of it could come back at once.
            waited, handles = jax.lax.optimization_barrier(
                ([cotangents[i] for i in arrays], [handed[number] for number in stored])
            )
            cotangents = list(cotangents)
            for i, ct in zip(arrays, waited, strict=True):
                cotangents[i] = ct
            for number, handle in reversed(list(zip(stored, handles, strict=True))):
                like = plan.sources[number].var.aval
                values[number] = _calls.fetch(handle, like, waited[:1], store_id=identity, site=sites[number])
            if blind := [values[number] for number in stored if not _calls.has_nan(plan.sources[number].info.dtype)]:
                for i in arrays:
                    cotangents[i] = _calls.guard(cotangents[i], blind, store_id=identity)
        return tuple(plan.rebuild(values)(cotangents))

    call = jax.custom_vjp(lambda *operands: list(evaluate(*operands)))
    call.defvjp(forward, backward)
    return call(*operands)


def ring_bytes(sizes: Sequence[int], flops: float) -> int:
    """What the device's ring should have for a function that stores tensors of these sizes while it computes so much.

    A tensor leaves XLA's memory through the ring, so the ring has room for one at least: of N layers that store one
    each, a share of 1 - 1 / N leaves the device. One is enough where the bus is as fast as the arithmetic: twelve
    layers of width 8,192 took 144.6 ms with one, 144.4 with two and 144.0 without offload. Where the bus is slower,
    forward waits for it as soon as the ring is full: 24 layers whose forward pass wants more than the bus has took 1.07
    times their compute with a ring of three and 1.03 with six. A layer that stores several needs no more than two
    layers' worth.
    """
    sizes = [-(-size // _RING_ALIGN) * _RING_ALIGN for size in sizes]
    total = sum(sizes)
    if flops >= _FLOPS_PER_BYTE * total:
        return total
    return max(2 * total, 6 * total // max(1, len(sizes)))


def _is_array(ct: Any) -> bool:
    return getattr(ct, "dtype", jax.dtypes.float0) != jax.dtypes.float0


def _check_leaves(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(
                f"offload: an argument of type {type(leaf).__name__} is no array; name its position in static_argnums, "
                "or close over it"
            )


def _as_function(policy: Policy | Iterable[str] | None) -> Policy:
    if policy is None:
        return lambda _: True
    if callable(policy):
        return policy
    if isinstance(policy, str):
        raise ValueError(f"offload: `policy` is a set of names or a function; for one name write policy=[{policy!r}]")
    names = frozenset(policy)
    return lambda residual: bool(names & residual.names)


def _activations(
    inputs: Inputs,
    num_args: int,
    avals: Sequence[Any],
    owner: Sequence[int],
    outputs: Sequence[Any],
    kept_argnums: Sequence[int],
) -> list[bool]:
    free = [position not in kept_argnums for position in owner]
    if inputs == "all":
        return free
    if inputs == "none":
        return [False] * len(avals)
    if inputs == "auto":
        # As many as there are outputs of a kind, and of several the last: parameters come first by custom, and one of
        # them can have the shape of an activation by chance.
        left = collections.Counter((tuple(out.shape), out.dtype) for out in outputs)
        flags = [False] * len(avals)
        for i in reversed(range(len(avals))):
            kind = (tuple(avals[i].shape), avals[i].dtype)
            if free[i] and left[kind] > 0:
                left[kind] -= 1
                flags[i] = True
        return flags
    if isinstance(inputs, str):
        raise ValueError(f"offload: `inputs` is 'auto', 'all', 'none' or positions of arguments; {inputs!r} was given")
    positions = {inputs} if isinstance(inputs, int) else set(inputs)
    if wrong := [p for p in positions if not -num_args <= p < num_args]:
        raise ValueError(f"offload: `inputs` names argument {wrong[0]}, but the function was called with {num_args}")
    chosen = {p % num_args for p in positions}
    return [position in chosen for position in owner]
