"""Activations and optimizer state on host memory and NVMe.

`offload(fn)` is used like `jax.checkpoint`: the residuals of `fn` leave the device after the forward pass and come back
ahead of their use. An `ActivationStore` holds them meanwhile. `docs/offload.md` is the guide. `dejax.offload.nnx` and
`dejax.offload.linen` offload Flax modules.
"""

from __future__ import annotations

import importlib
from typing import Any

from dejax.offload._layerwise import StackState, StackStep, stack_step
from dejax.offload._master import MasterState, master_weights
from dejax.offload._names import NamesPlan, NamesWay, plan_names
from dejax.offload._optimizer import optimizer
from dejax.offload._planner import CHOICES, Prediction, StackPlan, plan_stack
from dejax.offload._region import region
from dejax.offload._residuals import Residual
from dejax.offload._state_store import DiskArray, StateStore, restore
from dejax.offload._stats import StoreStats
from dejax.offload._step_plan import StepPlan, StepWay, plan_step
from dejax.offload._store import ActivationStore, default_store
from dejax.offload._telemetry import Recording
from dejax.offload._transform import offload
from dejax.offload._ways import Plan

_LAZY = ("linen", "nnx")  # these import flax

__all__ = [
    "CHOICES",
    "ActivationStore",
    "DiskArray",
    "MasterState",
    "NamesPlan",
    "NamesWay",
    "Plan",
    "Prediction",
    "Recording",
    "Residual",
    "StackPlan",
    "StackState",
    "StackStep",
    "StateStore",
    "StepPlan",
    "StepWay",
    "StoreStats",
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
