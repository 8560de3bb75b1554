"""GPUs that are only described: under `jax.sharding.use_abstract_mesh(H200)`, programs are lowered for one anywhere."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh

try:
    from jax.sharding import AbstractDevice
except ImportError:
    from jax._src.mesh import AbstractDevice


def gpus(device: str = "NVIDIA H200", size: int = 1, axis: str = "x", **options: Any) -> AbstractMesh:
    """A mesh of so many GPUs of a kind; `options` are those of an `AbstractMesh`."""
    return AbstractMesh((size,), (axis,), abstract_device=AbstractDevice(device, 132, "gpu"), **options)


H200 = gpus()
