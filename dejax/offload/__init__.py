"""Activations and optimizer state on host memory and NVMe. Not in this release yet.

What it will be: `offload(fn, policy=..., store=...)`, of the shape of `jax.checkpoint`, whose residuals leave the
device after the forward pass and come back, ahead of their use, in the backward pass.
"""

from typing import NoReturn

_PLANNED = ("Store", "offload", "plan")


def __getattr__(name: str) -> NoReturn:
    # ImportError for a planned name: `from dejax.offload import offload` would lose an AttributeError's message.
    error = ImportError if name in _PLANNED else AttributeError
    raise error(
        f"dejax.offload.{name}: dejax.offload is not in this release yet. Until it is, use `jax.checkpoint`, with "
        "`jax.checkpoint_policies.save_and_offload_only_these_names` for host memory."
    )
