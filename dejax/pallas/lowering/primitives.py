"""What kernels do beyond `jax.lax`: the primitives that the printer knows. Interpreted kernels have none of them."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import effects as jax_effects
from jax._src.pallas import core as pallas_core
from jax._src.state.types import ReadEffect, WriteEffect
from jax.extend.core import Primitive


class KernelBarrier(jax_effects.Effect):
    """Keeps a barrier where it is among the loads and stores of a kernel."""


_barrier_effect = KernelBarrier()
for _effects in (pallas_core.kernel_local_effects, jax_effects.control_flow_allowed_effects):
    _effects.add_type(KernelBarrier)

barrier_p = Primitive("kernel_barrier")
barrier_p.multiple_results = True
barrier_p.def_effectful_abstract_eval(lambda: ((), {_barrier_effect}))

atomic_add_p = Primitive("kernel_atomic_add")
atomic_add_p.def_effectful_abstract_eval(
    lambda ref, index, value, mask: (jax.core.ShapedArray(value.shape, value.dtype), {ReadEffect(0), WriteEffect(0)})
)

instruction_p = Primitive("kernel_instruction")
instruction_p.def_abstract_eval(lambda *args, text: jax.core.ShapedArray(args[0].shape, args[0].dtype))


def barrier() -> None:
    """All threads of a program wait for each other; each then sees what the others have stored."""
    barrier_p.bind()


def atomic_add(ref: Any, index: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Adds a tile to `ref[index]` where `mask` is true, and returns the previous elements; all tiles have one shape."""
    return atomic_add_p.bind(ref, index, value, mask)


def instruction(text: str, *args: jax.Array) -> jax.Array:
    """One instruction of PTX on each number of float32 tiles of one shape."""
    return instruction_p.bind(*args, text=text)
