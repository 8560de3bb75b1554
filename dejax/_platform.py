"""The device that programs are traced for: the one place that asks jax for it.

jax's default backend does not say it: `jax.default_device` and meshes of other devices take a program elsewhere. jax
keeps traces for different default devices and meshes apart, so that what is asked here may decide what is traced. Where
the arguments of a jitted function lie is only known when jax lowers the program.
"""

from __future__ import annotations

from typing import Any

import jax


def described_device() -> Any:
    """The abstract device of the mesh that is in use, such as that of a `shard_map`; None without one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def default_device() -> jax.Device:
    """The device of arrays that are given none: that of `jax.default_device`, else the first one of this process."""
    chosen = jax.config.values["jax_default_device"]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def platform() -> str:
    """The platform that programs are traced for, such as "gpu" or "cpu".

    That of the mesh in use, if it has devices, else of `jax.default_device`, else jax's default backend.
    """
    chosen = jax.config.values["jax_default_device"]
    name = getattr(described_device(), "platform", None) or getattr(chosen, "platform", chosen) or jax.default_backend()
    return "gpu" if name == "cuda" else str(name)


def on_gpu() -> bool:
    """Whether programs are traced for a GPU."""
    return platform() == "gpu"
