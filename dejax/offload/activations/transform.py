"""`offload`: a function whose residuals are in an `ActivationStore` between forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from dejax import _compat
from dejax.offload.activations.boundary import Boundary
from dejax.offload.activations.options import MIN_BYTES, Inputs, OffloadOptions, Policy, as_function, as_tuple
from dejax.offload.activations.store import ActivationStore, binding_of

F = TypeVar("F", bound=Callable[..., Any])


def offload(
    fn: F,
    *,
    policy: Policy | Iterable[str] | None = None,
    store: ActivationStore | Literal["device"] | None = None,
    inputs: Inputs = "auto",
    min_bytes: int = MIN_BYTES,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> F:
    """Offloads the activations of a function: like `jax.checkpoint`, but tensors are moved and not recomputed.

    The result computes what `fn` computes. Between forward and backward pass, the residuals of `fn` (the tensors that
    the backward pass needs) of at least `min_bytes` lie in an `ActivationStore`: on the device in a ring, in host
    memory or on disk. Parameters stay where they are. Equal tensors and views of one tensor are stored once. Gradients
    are bit-identical to those with `store="device"`, and equal to those of `fn` up to rounding, because XLA may fuse
    the operations differently.

    Works under `jit`, `scan`, `vmap`, `shard_map`, gradient accumulation, and inside and around `jax.checkpoint`.
    `offload(jax.checkpoint(fn))` stores only the inputs of `fn` and recomputes the rest.

    Put the whole step into `jax.jit`. Outside of `jit`, each call traces `fn` again and runs it operator by operator,
    as `jax.checkpoint` does.

    Args:
        fn: a function from pytrees of arrays to a pytree of arrays.
        policy: which residuals to store: names given with `jax.ad_checkpoint.checkpoint_name`, or a function from a
            `Residual` to a bool. None means all. Policies of `jax.checkpoint_policies` are not accepted.
        store: None means the store that is current in the thread that dispatches the step (`with
            ActivationStore(...)`), or `default_store()`. "device" keeps all tensors on the device, with the same
            barriers in the program, for comparisons.
        inputs: which arguments are activations, and so may be stored if the backward pass needs them. "auto" means each
            array with the shape and dtype of an output, like the input of a layer (if several match one output, the
            last of them). "all", "none", or a list of positions. All other arguments (parameters, tables) stay.
        min_bytes: smaller tensors stay on the device.
        static_argnums, static_argnames: positions and names of arguments that are not arrays, as in `jax.jit`.

    Raises:
        NotImplementedError: for a second derivative, for forward-mode derivatives, or if `fn` has side effects that JAX
            does not allow under derivatives.
        TypeError: an argument is neither an array nor static, or is a `jax.Ref`; `policy` is one of
            `jax.checkpoint_policies`, or returns no bool.
        ValueError: `inputs` names no argument, or is another word; `policy` has a name that no tensor of `fn` has.
        NativeExtensionError: dejax's native extension is missing.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.offload import ActivationStore, offload
    >>> layer = offload(lambda w, x: jnp.tanh(x @ w), min_bytes=0)
    >>> with ActivationStore() as store:
    ...     gradient = jax.grad(lambda w: layer(w, jnp.ones((2, 3))).sum())(jnp.eye(3))
    >>> gradient.shape
    (3, 3)
    """
    return wrap(fn, OffloadOptions(policy, store, inputs, min_bytes, static_argnums, static_argnames))  # type: ignore[no-any-return]


def wrap(fn: Callable[..., Any], options: OffloadOptions) -> Any:
    """The common part of `offload`, `region` and their forms for Flax modules."""
    static, static_names = as_tuple(options.static_argnums), as_tuple(options.static_argnames)
    options = replace(options, policy=as_function(options.policy))

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = _CallArguments.of(fn, options, args, kwargs, static, static_names)
        _check_leaves(call.leaves)
        out_tree, boundary, consts = _trace(call)
        out = boundary([*consts, *call.leaves])
        return jax.tree.unflatten(out_tree, out)

    return wrapped


@dataclass(frozen=True)
class _CallArguments:
    """A call of an offloaded function, with its static arguments kept separately from its arrays.

    Attributes:
        fixed: static arguments by position, static keyword arguments by name.
        num_args: number of positional arguments.
        leaves, treedef: the leaves and tree structure of the other arguments, `(list of positional, dict of keyword)`.
        owner: for each leaf its argument's position, -1 for keyword arguments.
    """

    fn: Callable[..., Any]
    options: OffloadOptions
    fixed: dict[int | str, Any]
    num_args: int
    leaves: list[Any]
    treedef: Any
    owner: tuple[int, ...]

    @staticmethod
    def of(
        fn: Callable[..., Any],
        options: OffloadOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: tuple[int, ...],
        static_names: tuple[str, ...],
    ) -> _CallArguments:
        fixed: dict[int | str, Any] = {i % len(args): args[i] for i in static if -len(args) <= i < len(args)}
        fixed |= {name: kwargs[name] for name in static_names if name in kwargs}
        moving = {i: arg for i, arg in enumerate(args) if i not in fixed}
        named = {name: arg for name, arg in kwargs.items() if name not in fixed}
        leaves, treedef = jax.tree.flatten((list(moving.values()), named))
        owner = [i for i, arg in moving.items() for _ in jax.tree.leaves(arg)]
        owner += [-1] * (len(leaves) - len(owner))
        return _CallArguments(fn, options, fixed, len(args), leaves, treedef, tuple(owner))

    def flat(self) -> Callable[..., Any]:
        """The call as a function of the leaves of its arguments; the function holds none of them."""
        fn, fixed, treedef, num_args = self.fn, self.fixed, self.treedef, self.num_args

        def flat(*leaves: Any) -> Any:
            moving, named = jax.tree.unflatten(treedef, leaves)
            rest = iter(moving)
            args = [fixed[i] if i in fixed else next(rest) for i in range(num_args)]
            names = {name: value for name, value in fixed.items() if isinstance(name, str)}
            return fn(*args, **named, **names)

        return flat


def _trace(call: _CallArguments) -> tuple[Any, Boundary, list[Any]]:
    """The tree of the outputs, the traced function, and the arrays that it closes over: its first arguments."""
    # Tracing turns the arrays that the function closes over, such as a model's parameters, into arguments.
    closed, shapes = jax.make_jaxpr(call.flat(), return_shape=True)(*call.leaves)
    _check_no_references(call, [*closed.consts, *call.leaves])
    _check_effects(call, closed)
    options = call.options
    if (rewrite := options.rewrite) is not None:
        original = closed
        closed = jax.make_jaxpr(lambda *leaves: rewrite(original, leaves, options))(*call.leaves)
    avals = [jax.typeof(x) for x in [*closed.consts, *call.leaves]]
    flags = options.activations(call.num_args, closed.in_avals, call.owner, jax.tree.leaves(shapes))
    name = getattr(call.fn, "__qualname__", type(call.fn).__name__)
    flags = [False] * len(closed.consts) + flags
    boundary = Boundary(name, _compat.without_consts(closed), avals, flags, options, binding_of(options.store))
    return jax.tree.structure(shapes), boundary, list(closed.consts)


def _is_reference(x: Any) -> bool:
    return "AbstractRef" in type(jax.typeof(x)).__name__


def _check_no_references(call: _CallArguments, operands: Sequence[Any]) -> None:
    if any(map(_is_reference, operands)):
        name = getattr(call.fn, "__qualname__", type(call.fn).__name__)
        raise TypeError(
            f"offload: `{name}` must not be given or close over a jax.Ref: backward could not know its earlier value. "
            "Read it before the call, give the value as an argument, and write the function's result after the call"
        )


def _check_effects(call: _CallArguments, closed: Any) -> None:
    if _compat.staging_trace() is None:
        return  # outside of `jit` side effects happen as they come
    if refused := _compat.effects_refused_under_derivatives(closed.effects):
        name = getattr(call.fn, "__qualname__", type(call.fn).__name__)
        raise NotImplementedError(
            f"offload: `{name}` has side effects that JAX does not allow where a derivative is defined: "
            f"{', '.join(map(str, refused))}. Move them out of the offloaded function: return the values that they "
            "need, and use those outside"
        )


def _check_leaves(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, jax.Ref):
            continue  # refused below, together with references that are closed over
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(
                f"offload: arguments must be arrays or static, got {type(leaf).__name__}; name its position in "
                "static_argnums, or close over it"
            )
