"""Activations and optimizer state on host memory and NVMe.

`offload(fn)` is used like `jax.checkpoint`: the residuals of `fn` leave the device after the forward pass and come back
ahead of their use. An `ActivationStore` holds them meanwhile. `docs/offload.md` is the guide. `dejax.offload.nnx` and
`dejax.offload.linen` offload Flax modules.
"""

from __future__ import annotations

import importlib
from typing import Any

from dejax.offload.activations.region import region
from dejax.offload.activations.residuals import Residual
from dejax.offload.activations.stats import StoreStats
from dejax.offload.activations.store import ActivationStore, default_store
from dejax.offload.activations.transform import offload
from dejax.offload.plan.activations import CHOICES, plan_names, plan_stack
from dejax.offload.plan.result import Plan, Way
from dejax.offload.plan.step import plan_step
from dejax.offload.state.master import MasterState, master_weights
from dejax.offload.state.optimizer import optimizer
from dejax.offload.state.stack_step import StackState, StackStep, stack_step
from dejax.offload.state.store import DiskArray, StateStore, restore
from dejax.offload.telemetry import Recording

_LAZY = ("linen", "nnx")  # these import flax

__all__ = [
    "CHOICES",
    "ActivationStore",
    "DiskArray",
    "MasterState",
    "Plan",
    "Recording",
    "Residual",
    "StackState",
    "StackStep",
    "StateStore",
    "StoreStats",
    "Way",
    "default_store",
    "master_weights",
    "offload",
    "optimizer",
    "plan_names",
    "plan_stack",
    "plan_step",
    "region",
    "restore",
    "stack_step",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"dejax.offload.{name}")
    raise AttributeError(f"module 'dejax.offload' has no attribute {name!r}")
