"""What differs between the supported versions of jax (>= 0.10.2, < 0.13), in one place."""

import contextlib
import enum
import os
from collections.abc import Collection
from typing import Any

import jax
import jax.extend.backend
import jax.extend.core
import jax.interpreters.batching
import jax.interpreters.mlir
import numpy as np
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import distributed, xla_bridge
from jax._src import effects as jax_effects
from jax._src.core import ManualAxisType
from jaxlib.mlir.dialects import sdy

JAX_VERSION: tuple[int, ...] = jax.__version_info__
"""jax's version as integers, for comparisons such as `JAX_VERSION >= (0, 11)`."""

SUPPORTED_JAX = ((0, 10, 2), (0, 13))
"""The first supported version of jax, and the first one beyond the supported range."""


def computed_once(x: jax.Array, true: jax.Array) -> jax.Array:
    """`x`, which XLA does not compute again, with other roundings, for another reader.

    XLA of jax 0.10 computes across a barrier for the CPU, but not across a branch that it cannot decide: `true` is a
    scalar that is true, of which the compiler does not know it.
    """
    x = jax.lax.optimization_barrier(x)
    if JAX_VERSION >= (0, 11) or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):  # others do not round
        return x
    return jax.lax.cond(true, lambda x: x, jax.numpy.negative, x)


def reduce_extremum(
    kind: str, x: jax.Array, axes: int | tuple[int, ...], keepdims: bool = False, initial: Any = None
) -> jax.Array:
    """`jax.numpy`'s `max` or `min` along axes, NaN where one of the elements is NaN.

    On a CPU XLA leaves reductions of 4,096 float32 elements or more to a library that drops NaN (jax 0.10 to 0.12).
    """
    initial = initial if initial is None else np.asarray(initial, x.dtype)  # the largest uint32 is no int32
    found = getattr(jax.numpy, kind)(x, axis=axes, keepdims=keepdims, initial=initial)
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        return found
    return jax.numpy.where((x != x).any(axes, keepdims=keepdims), np.asarray(np.nan, x.dtype), found)


def own_empty_arrays(tree: Any) -> Any:
    """`tree` with new arrays in place of those without elements.

    The compiler of jax 0.11 crashes where the body of a `shard_map` reads an argument without elements. So a body, and
    the gradient of a function that may run in one, read arrays of their own in place of such arguments.
    """

    def own(x: Any) -> Any:
        empty = isinstance(x, jax.Array) and x.size == 0 and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        return jax.numpy.zeros(x.shape, x.dtype) if empty else x

    return jax.tree.map(own, tree)


def unsupported_jax() -> str | None:
    """Why the installed jax is outside the supported range; None where it is inside."""
    first, beyond = SUPPORTED_JAX
    if first <= JAX_VERSION < beyond:
        return None
    wanted = f">={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}"
    return f"jax {jax.__version__} is installed, dejax supports {wanted}: pip install 'jax{wanted}'"


def backends() -> dict[str, Any]:
    """jax's clients by platform; makes them where they are not made yet."""
    return jax.extend.backend.backends()


def backends_are_initialized() -> bool:
    """Whether jax has made its clients; asking does not make them."""
    return bool(getattr(xla_bridge, "backends_are_initialized", lambda: True)())


def own_memory(value: Any) -> Any:
    """A numpy array as a copy, anything else as it is, for `jax.device_put` and `jnp.asarray(..., dtype)`.

    On a CPU these keep the memory of an aligned numpy array, `device_put` with `may_alias=False`, too: what the array's
    owner writes there later would be in the jax array.
    """
    return np.array(value) if isinstance(value, np.ndarray) else value


_lacks_threads = False


def lacks_threads() -> bool:
    """Whether this process is a fork of one that had used jax: it lacks jax's threads, and computations hang."""
    return _lacks_threads


def _after_fork() -> None:
    global _lacks_threads
    _lacks_threads = _lacks_threads or backends_are_initialized()


os.register_at_fork(after_in_child=_after_fork)


def searches_for_nan() -> bool:
    """Whether jax calls a jitted function again outside of jit where its results have a NaN or an infinity."""
    config: Any = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs)


def staging_trace() -> Any:
    """The innermost trace that makes a jaxpr of what runs now (`jit`, the body of a loop), or None: it runs at once."""
    trace = getattr(jax.extend.core.get_opaque_trace_state(), "_trace_ref", lambda: None)()
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def without_consts(closed: Any) -> Any:
    """A closed jaxpr without values, whose constants are its first arguments."""
    jaxpr = closed.jaxpr
    bare = jaxpr.replace(
        constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return jax.extend.core.ClosedJaxpr(bare, [])


def effects_refused_under_derivatives(effects: Any) -> list[Any]:
    """The arguments that `custom_vjp` does not take."""
    allowed = getattr(jax_effects, "custom_derivatives_allowed_effects", None)
    return [] if allowed is None else list(allowed.filter_not_in(effects))


def sharding_group(x: jax.Array, group: int) -> jax.Array:
    """`x`, which gets the sharding of all other values of its group where a program runs on several devices.

    jax 0.10 has this in pairs, as `jax.experimental.shard_alike`, and jax 0.12 no longer.
    """
    return sharding_group_p.bind(x, group=group)


sharding_group_p = jax.extend.core.Primitive("dejax_sharding_group")
sharding_group_p.def_impl(lambda x, *, group: x)
sharding_group_p.def_abstract_eval(lambda x, *, group: x)


def _on_several_devices(ctx: Any) -> bool:
    """Whether what is lowered is divided among devices by XLA; inside of shard_map it is local."""
    where = ctx.module_context.axis_context
    return not getattr(where, "manual_axes", None) and (getattr(where, "num_devices", None) or 1) > 1


def _lower_sharding_group(ctx: Any, x: Any, *, group: int) -> list[Any]:
    if _on_several_devices(ctx):  # what is local has no sharding, and no group reaches beyond it
        sdy.ShardingGroupOp(x, group)
    return [x]


jax.interpreters.mlir.register_lowering(sharding_group_p, _lower_sharding_group)


def on_one_device(x: jax.Array, otherwise: str) -> jax.Array:
    """`x`, in a program of one device; the lowering of a program of several raises ValueError with `otherwise`."""
    return on_one_device_p.bind(x, otherwise=otherwise)


on_one_device_p = jax.extend.core.Primitive("dejax_on_one_device")
on_one_device_p.def_impl(lambda x, *, otherwise: x)
on_one_device_p.def_abstract_eval(lambda x, *, otherwise: x)


def _lower_on_one_device(ctx: Any, x: Any, *, otherwise: str) -> list[Any]:
    if _on_several_devices(ctx):
        raise ValueError(otherwise)
    return [x]


jax.interpreters.mlir.register_lowering(on_one_device_p, _lower_on_one_device)


def shard_grid(sharding: Any, rank: int) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Into how many parts a sharding cuts each axis, and the part that each device holds, by the device's id.

    Unlike `devices_indices_map` it also takes sizes that are no multiples, and meshes of which some axes are manual.
    """
    devices = [device.id for device in sharding._device_assignment]
    division = sharding._to_xla_hlo_sharding(rank)
    if hasattr(division, "v3_to_v2_sharding"):
        division = division.v3_to_v2_sharding()
    if division.is_replicated() or division.is_manual():
        return (1,) * rank, dict.fromkeys(devices, (0,) * rank)
    sizes = tuple(division.tile_assignment_dimensions())
    parts = np.indices(sizes).reshape(len(sizes), -1)[:rank].T.tolist()
    held = zip(division.tile_assignment_devices(), parts, strict=True)
    return sizes[:rank], {devices[place]: tuple(part) for place, part in held}


def no_mesh() -> Any:
    """A context in which types of arrays have no sharding: for what runs on one device's shard."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def on_devices(devices: Collection[Any]) -> Any:
    """A context for computing on one device, because jax accepts no array of one device where the caller has set a mesh
    (`jax.set_mesh`). Without a mesh, and for other than one device, it changes nothing.
    """
    if len(devices) != 1 or jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(jax.sharding.Mesh(np.array(list(devices)), ("device",)))


def devices_of_the_mesh() -> set[Any]:
    """The devices of the mesh that the caller has set, on which jax computes; none without one, or while tracing."""
    if jax.sharding.get_abstract_mesh().empty or not jax_core.trace_state_clean():
        return set()
    return set(jax.sharding.get_mesh().devices.flat)


def trace_settings() -> tuple[Any, ...]:
    """jax's settings that change what is traced, such as 64-bit mode, as texts; meshes and axes by their types only."""
    plain = bool, int, float, str, type(None), enum.Enum
    return tuple(str(s) if isinstance(s, plain) else type(s).__name__ for s in jax_config.trace_context())


def on_several_devices() -> bool:
    """Whether what is traced now runs inside of a `shard_map` over several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.manual_axes)


def manual_axes() -> tuple[str, ...]:
    """The axes of the `shard_map` inside of which is traced, in the order of the mesh; () outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name in mesh.manual_axes)


def varying_alike(tree: Any) -> Any:
    """`tree`, whose arrays vary over the same axes of the mesh: over those of any of them.

    In a `jax.shard_map` with `check_vma=True`, types say over which axes an array varies. Rules of derivatives that are
    ours give each argument a gradient of the device's own, so each argument must vary as their results do: its gradient
    is then summed over the devices by the transpose of the cast. Outside of such a `shard_map` nothing is changed.
    """
    if not jax_config._check_vma.value:
        return tree
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))
    if not axes:
        return tree

    def cast(x: Any) -> Any:
        rest = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying)) if hasattr(x, "dtype") else ()
        return jax.lax.pcast(x, rest, to="varying") if rest else x

    return jax.tree.map(cast, tree)


def varying_result(shape: tuple[int, ...], dtype: Any, *operands: Any) -> Any:
    """The type of a call's result, which varies over the axes of the mesh over which any operand of these types does.

    JAX takes a result without such axes for the same on all devices, and does not sum what is computed from it.
    """
    if not jax_config._check_vma.value:
        return jax.core.ShapedArray(shape, dtype)
    axes = frozenset().union(*(x.manual_axis_type.varying for x in operands))
    none = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), none)
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=ManualAxisType(varying=axes))


def without_checks() -> Any:
    """A context in which a `jax.shard_map` does not check over which axes arrays vary.

    Kernels, and functions that are traced while JAX lowers a program, do not say it of the values inside of them.
    """
    return jax_config._check_vma(False)


def lower_unchecked(function: Any, multiple_results: bool = True) -> Any:
    """A lowering by a function that is traced then, in which is not checked over which axes arrays vary."""
    lower = jax.interpreters.mlir.lower_fun(function, multiple_results=multiple_results)

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        with without_checks():
            same = [aval.update(manual_axis_type=ManualAxisType()) for aval in ctx.avals_in]
            return lower(ctx.replace(avals_in=same), *operands, **params)

    return rule


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of carried arrays of a `scan` equation."""
    if "ft_in" in eqn.params:  # jax 0.12
        consts, carry, _ = (list(part) for part in eqn.params["ft_in"].update(eqn.invars).unpack())
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def closed_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr with its constants; those inside of equations are closed or not, by version."""
    return jaxpr if hasattr(jaxpr, "jaxpr") else jax.extend.core.ClosedJaxpr(jaxpr, getattr(jaxpr, "consts", ()))


def process_index() -> int:
    """The number of this process in `jax.distributed`; asking does not make clients."""
    return int(getattr(distributed.global_state, "process_id", 0) or 0)


def processes_on_this_machine() -> int:
    """Number of processes of `jax.distributed`, where all are on this machine: their coordinator is its loopback."""
    state = distributed.global_state
    host = (getattr(state, "coordinator_address", None) or "").rpartition(":")[0].strip("[]")
    is_here = host == "localhost" or host.startswith("127.") or host == "::1"
    return int(getattr(state, "num_processes", None) or 1) if is_here else 1


def coordination() -> tuple[Any, int, int, str]:
    """The state of `jax.distributed`: the client of its coordination service (None before `jax.distributed` is
    initialized), the number of this process, the number of all processes, and the coordinator's address.
    """
    state = distributed.global_state
    address = getattr(state, "coordinator_address", None) or ""
    return getattr(state, "client", None), process_index(), int(getattr(state, "num_processes", None) or 1), address


_left: list[Any] = []  # their destructors would wait for processes that are gone


def leave_coordination() -> None:
    """Lets this process end without a last meeting of all processes, which would wait for those that are gone."""
    state = distributed.global_state
    _left.extend((state.client, state.service, getattr(state, "preemption_sync_manager", None)))
    state.client = state.service = state.preemption_sync_manager = None
