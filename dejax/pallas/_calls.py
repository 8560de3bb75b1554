"""The call of a kernel, as JAX sees it: an operation whose kernel is traced where its call is not kept already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.interpreters.ad
import jax.interpreters.batching
import jax.interpreters.mlir
from jax.extend.core import Primitive, jaxpr_as_fun

from dejax import _compat
from dejax._files import programs_are_kept
from dejax.pallas.lowering import launch
from dejax.pallas.lowering.choice import lowered_by
from dejax.pallas.lowering.identity import NotToldError, identity_of
from dejax.pallas.lowering.kept import KeptCall, keep_call, kept_call
from dejax.pallas.machine import compute_capability


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KernelCall:
    """A kernel and how it is compiled.

    Attributes:
      name: its name in messages.
      call: the `pl.pallas_call` of it.
      out_shape: the shapes and dtypes of its results.
      elsewhere: what is called in its place where a program is lowered for no GPU, and traced then; None: `call`.
      lowering: which of `LOWERINGS` compiles it; None where it is interpreted.
      identity: what tells it from other calls, if calls are kept.
      kept: its call, if that is kept.
    """

    name: str
    call: Callable[..., Sequence[jax.Array]]
    out_shape: tuple[jax.ShapeDtypeStruct, ...]
    elsewhere: Callable[..., Sequence[jax.Array]] | None = None
    lowering: str | None = None
    identity: str | None = None
    kept: KeptCall | None = None

    def __repr__(self) -> str:
        return self.name

    def traced(self, operands: Sequence[Any]) -> Any:
        """The jaxpr of the call with operands like these, whose kernel Triton begins to compile if we lower it."""
        with lowered_by(self.lowering), _compat.without_checks():
            jaxpr = jax.make_jaxpr(self.call)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
        if self.lowering == "dejax":
            launch.prepare_kernels(jaxpr)
        return jaxpr


def looked_up(kernel: KernelCall, *parts: Any) -> KernelCall:
    """The kernel with its call, if that is kept; `parts`, with the kernel's name, tell the kernel from all others.

    Calls are kept where JAX keeps compiled programs: elsewhere the next process compiles each program again, too.
    """
    capability = compute_capability()
    if kernel.lowering is None or capability is None or not programs_are_kept():
        return kernel
    try:
        found = identity_of(kernel.name, kernel.out_shape, kernel.lowering, capability, *parts)
    except NotToldError:
        return kernel
    return replace(kernel, identity=found, kept=kept_call(found))


def call_kernel(kernel: KernelCall, operands: Sequence[Any]) -> list[jax.Array]:
    """The results of a kernel, which vary over the axes of a mesh as all operands do."""
    operands = _compat.varying_alike(tuple(operands))
    jaxpr = None if kernel.kept else kernel.traced(operands)
    if kernel.lowering != "dejax":
        return list(kernel_call_p.bind(*operands, kernel=kernel, jaxpr=jaxpr))
    # Barriers keep it apart from the slices around it, as all calls of native code (`dejax._native.ffi_call` says why).
    results = kernel_call_p.bind(*jax.lax.optimization_barrier(operands), kernel=kernel, jaxpr=jaxpr)
    return list(jax.lax.optimization_barrier(results))


kernel_call_p = Primitive("dejax_kernel_call")
kernel_call_p.multiple_results = True


def _run(*operands: Any, kernel: KernelCall, jaxpr: Any) -> Any:
    return jaxpr_as_fun(jaxpr or kernel.traced(operands))(*operands)


def _run_elsewhere(*operands: Any, kernel: KernelCall, jaxpr: Any) -> Any:
    return _run(*operands, kernel=kernel, jaxpr=jaxpr) if kernel.elsewhere is None else kernel.elsewhere(*operands)


def _types(*operands: Any, kernel: KernelCall, jaxpr: Any) -> list[Any]:
    outs = kernel.out_shape if jaxpr is None else jaxpr.out_avals
    return [_compat.varying_result(out.shape, out.dtype, *operands) for out in outs]


def _lower_for_cuda(ctx: Any, *operands: Any, kernel: KernelCall, jaxpr: Any) -> Any:
    own = kernel.lowering == "dejax"
    if kernel.identity is None or (own and launch.leaves(ctx)):
        return _lower(ctx, *operands, kernel=kernel, jaxpr=jaxpr)
    if kernel.kept is not None:
        if own:
            launch.load_extension()
        return kernel.kept.emit(ctx.module_context.context, operands)
    results = _lower(ctx, *operands, kernel=kernel, jaxpr=jaxpr)
    keep_call(kernel.identity, results, launch.binary_key(jaxpr) if own else None)
    return results


def _batch(operands: Any, axes: Any, *, kernel: KernelCall, jaxpr: Any) -> tuple[Any, Any]:
    one = [_without(x, axis) for x, axis in zip(operands, axes, strict=True)]
    each = jaxpr_as_fun(jaxpr or kernel.traced(one))
    mapped = partial(jax.vmap, in_axes=tuple(axes))
    other = None if kernel.elsewhere is None else mapped(kernel.elsewhere)
    several = replace(kernel, call=mapped(each), elsewhere=other, identity=None, kept=None)
    results = kernel_call_p.bind(*operands, kernel=several, jaxpr=several.traced(operands))
    return results, [0] * len(results)


def _without(x: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    shape = x.shape if axis is None else (*x.shape[:axis], *x.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _no_derivative(primals: Any, tangents: Any, *, kernel: KernelCall, jaxpr: Any) -> Any:
    raise NotImplementedError(
        f"the kernel {kernel.name} has no derivative of its own; differentiate a dejax.rgnn program, which makes its "
        "own backward kernels, or give the function that calls the kernel a jax.custom_vjp"
    )


kernel_call_p.def_impl(_run)
kernel_call_p.def_abstract_eval(_types)
_lower = _compat.lower_unchecked(_run)
jax.interpreters.mlir.register_lowering(kernel_call_p, _compat.lower_unchecked(_run_elsewhere))
jax.interpreters.mlir.register_lowering(kernel_call_p, _lower, platform="rocm")
jax.interpreters.mlir.register_lowering(kernel_call_p, _lower_for_cuda, platform="cuda")
jax.interpreters.batching.primitive_batchers[kernel_call_p] = _batch
jax.interpreters.ad.primitive_jvps[kernel_call_p] = _no_derivative
