"""What kernels compute, read from their jaxprs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Pallas' Triton lowering of these drops NaN; kernels take extrema of floats by `dejax.pallas._triton`.
_EXTREMA = {"max", "min", "clamp", "reduce_max", "reduce_min", "cummax", "cummin", "argmax", "argmin"}


def kernel_equations(jaxpr: Any, kernel: str | None = None) -> Iterator[tuple[str, Any]]:
    """The equations inside of kernels, and the kernels' names."""
    for e in jaxpr.eqns:
        name = str(e.params.get("name", "kernel")) if e.primitive.name == "pallas_call" else kernel
        if kernel:
            yield kernel, e
        inner = jax.tree.leaves(list(e.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"))
        for part in (getattr(p, "jaxpr", p) for p in inner):
            if hasattr(part, "eqns"):
                yield from kernel_equations(part, name)


def assert_extrema_keep_nan(jaxpr: Any) -> None:
    """No kernel takes extrema of floats by JAX's own operations, but along axes of size 1, which compares nothing."""
    found = {
        f"{kernel}: {e}"
        for kernel, e in kernel_equations(jaxpr)
        if e.primitive.name in _EXTREMA
        and any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in e.invars)
        and not ("axes" in e.params and all(e.invars[0].aval.shape[a] == 1 for a in e.params["axes"]))
    }
    assert not found, "extrema of floats that drop NaN on a GPU: " + "; ".join(sorted(found))
