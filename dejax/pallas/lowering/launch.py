"""Calls of kernels in a program, launched by dejax's own FFI handler `dejax_kernel`.

A call names its kernel's binary by a key: while XLA compiles the program, Triton still compiles kernels, and the first
launch waits for them. Programs that leave the process, by `jax.export` or because it has no GPU, have the binaries.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax._src.pallas import core as pallas_core

from dejax import _native
from dejax._optional import is_there
from dejax.pallas.lowering.binary import KernelSource, found, prepare
from dejax.pallas.lowering.text import kernel_text
from dejax.pallas.machine import compute_capability

HANDLER = "dejax_kernel"
# By the kernel's jaxpr: a kernel is printed when it is traced, and its text is asked for again when it is lowered.
_texts: weakref.WeakKeyDictionary[Any, tuple[Any, str, str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class KernelSchedule:
    """Parameters of a `pl.pallas_call` by which its kernel is lowered here."""

    BACKEND: ClassVar[str] = "dejax"
    num_warps: int
    num_stages: int


def prepare_kernels(jaxpr: Any) -> None:
    """Begins to compile the kernels that a closed jaxpr calls, while the rest of a program is traced."""
    capability = compute_capability()
    for equation in jaxpr.jaxpr.eqns:
        if capability is not None and equation.primitive.name == "pallas_call":
            prepare(_source(equation.params, capability))


def binary_key(jaxpr: Any) -> int:
    """The key of the binary of the only kernel that a closed jaxpr calls."""
    (equation,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "pallas_call")
    capability = compute_capability()
    assert capability is not None
    return _source(equation.params, capability).key


def leaves(ctx: Any) -> bool:
    """Whether a program that is lowered may run in another process, so that its calls have the binaries of kernels."""
    return bool(ctx.module_context.lowering_parameters.for_export) or jax.default_backend() not in ("gpu", "cuda")


def _source(params: Any, capability: int) -> KernelSource:
    """The source from which the kernel of a `pallas_call` equation with these parameters is compiled."""
    mapping, schedule = params["grid_mapping"], params["compiler_params"]
    if mapping.num_dynamic_grid_bounds or mapping.num_index_operands:
        raise NotImplementedError("a kernel whose grid is computed by the program")
    name = re.sub(r"\W", "_", str(params["name"]))
    name = f"kernel_{name}" if name[:1].isdigit() else name
    jaxpr = params["jaxpr"]
    dtypes = tuple(np.dtype(x.aval.dtype).name for x in jaxpr.invars)
    printed_for, called, text = _texts.get(jaxpr, (None, "", ""))
    if printed_for is not mapping or called != name:  # `vmap` changes the grid alone
        text = kernel_text(jaxpr, mapping, name)
        _texts[jaxpr] = mapping, name, text
    return KernelSource(text, name, dtypes, schedule.num_warps, schedule.num_stages, capability)


@functools.cache
def load_extension() -> None:
    """Registers the handler, and what finds binaries for it."""
    _native.extension("the lowering 'dejax' of kernels").set_kernel_finder(found)


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """The lowering rule: a native call with the kernel's key, or with its binary where the program is exported."""
    load_extension()
    capability = compute_capability()
    if capability is None:
        raise ValueError(
            "lowering 'dejax' compiles kernels for one kind of GPU, and there is none: lower inside of "
            "jax.sharding.use_abstract_mesh, with a mesh of an abstract device such as an NVIDIA H100"
        )
    source = _source(params, capability)
    coming = prepare(source)
    image, key, shared_bytes = b"", source.key, 0
    if leaves(ctx) or coming.done() or not is_there("triton"):
        made = coming.result()  # an error is raised here, where it can be
        if leaves(ctx):
            image, shared_bytes = made.image, made.shared_bytes
            key = int.from_bytes(hashlib.sha256(image).digest()[:8], "little", signed=True)
    call = jax.ffi.ffi_lowering(HANDLER, operand_output_aliases=dict(params["input_output_aliases"]))
    return call(
        ctx,
        *operands,
        key=key,
        image=base64.b64encode(image).decode(),
        name=source.name,
        programs=math.prod(params["grid_mapping"].grid),
        threads=32 * source.num_warps,
        shared_bytes=shared_bytes,
    )


pallas_core.register_lowering_rule(KernelSchedule, _lower, "gpu")
