"""The cost of a training step whose state lies on the device, in host memory and on a drive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dejax.offload.plan.copy_cost import FREE, Carried, CopyCosts
from dejax.offload.plan.profile import NOTHING, Tiers, Traffic, place
from dejax.offload.state.moments import Tier

_STAGED_LAYERS = 4  # two on their way to the device and two on their way back


@dataclass(frozen=True, slots=True)
class StepWay:
    """A way to run a step, with its predicted memory and time.

    Attributes:
        far: paths of the arrays in host memory, such as "params['w']" and "moments[0].mu['w']".
        on_disk: likewise, of the arrays on a drive.
        activations: where the layers' inputs lie.
        microbatches: parts of a batch.
        device_bytes: state, temporaries and staging memory on the device.
        staging_bytes: of it, memory through which state travels, and the store's ring.
        host_bytes: state and activations in host memory, and state on its way to and from a drive.
        disk_bytes: activations on disk, and two versions of the state there.
        seconds: of a step.
        stall_seconds: the part of it that waits for the bus or the drive.
        copy_seconds: the part of it in which the device copies between staging memory and XLA's buffers.
        launch_seconds: what the launching thread needs. A step takes at least as long.

    >>> import jax.numpy as jnp, optax
    >>> from dejax.offload import plan_step
    >>> plan = plan_step(  # doctest: +SKIP
    ...     lambda outer, x: x * outer["scale"],
    ...     lambda w, x: x + jnp.tanh(x @ w),
    ...     lambda outer, x, batch: jnp.mean(x**2),
    ...     optax.adam(1e-3),
    ...     {"scale": jnp.ones(())},
    ...     jnp.ones((6, 128, 128)) / 128,
    ...     jnp.ones((16, 128)),
    ...     device_bytes=1 << 30,
    ... )
    >>> plan.chosen.far, plan.chosen.microbatches, plan.chosen.seconds  # doctest: +SKIP
    """

    far: frozenset[str]
    on_disk: frozenset[str]
    activations: Tier
    microbatches: int
    device_bytes: float
    staging_bytes: float
    host_bytes: float
    disk_bytes: float
    seconds: float
    stall_seconds: float
    copy_seconds: float = 0.0
    launch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Short stacks with all state on the device, for one number of microbatches.

    Attributes:
        base_bytes, layer_bytes: temporaries of a stack of n layers, without the layers' inputs.
        base_seconds, layer_seconds: likewise, time of a step.
        forward_seconds: of a layer.
        input_bytes: of a layer's input.
        base_launch, layer_launch: as base_seconds and layer_seconds, time of the launching thread.
    """

    base_bytes: float
    layer_bytes: float
    base_seconds: float
    layer_seconds: float
    forward_seconds: float
    input_bytes: int
    base_launch: float = 0.0
    layer_launch: float = 0.0


@dataclass(frozen=True, slots=True)
class Leaf:
    path: str
    nbytes: int
    is_param: bool
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class KeptGradients:
    """Gradients of the stack: freed in backward, or kept; bytes and number of those that are kept in host memory."""

    freed: bool = True
    far_bytes: int = 0
    far_count: int = 0


@dataclass(frozen=True, slots=True)
class Drive:
    """Arrays on a drive, and its bandwidths in bytes a second."""

    leaves: tuple[Leaf, ...] = ()
    write_bandwidth: float = float("inf")
    read_bandwidth: float = float("inf")

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def param_seconds(self) -> float:
        """To read the parameters."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.is_param) / self.read_bandwidth

    @property
    def seconds(self) -> float:
        """To read all and to write what changes. One drive does both in turn."""
        changed = sum(leaf.nbytes for leaf in self.leaves if not leaf.is_frozen)
        return self.nbytes / self.read_bandwidth + changed / self.write_bandwidth


FREED, NO_DRIVE = KeptGradients(), Drive()


def _ends(seconds: float, traffic: Traffic, tiers: Tiers, *, early: bool) -> float:
    """What a loop takes beyond its slowest part, times its number of layers.

    The first layer waits for its rows, and the loop ends when the last layer's rows are back. So of the ways in and out
    and the arithmetic, all but the slowest add the time of one layer.

    Args:
        seconds: of the arithmetic.
        traffic: of the loop.
        tiers: the tiers below the device.
        early: whether the first layer's rows come before the loop.
    """
    into, out = traffic.in_bytes / tiers.in_bandwidth, traffic.out_bytes / tiers.out_bandwidth
    slowest = max(seconds, into, out)
    return seconds + out + (0.0 if early and into < slowest else into) - slowest


def _carried(away: Sequence[Leaf], kept: KeptGradients, stored: float) -> tuple[Carried, Carried, Carried]:
    """What the calls of forward, backward and the update after it carry."""
    changed = [leaf for leaf in away if not leaf.is_frozen]
    params = _arrays(leaf for leaf in away if leaf.is_param)
    gradients = Carried(kept.far_bytes, kept.far_count, min(kept.far_count, 1))
    inputs = Carried(stored, 1, 1) if stored else Carried()
    back = _arrays(changed)
    if kept.freed:
        return params + inputs, _arrays(away) + back + inputs, Carried()
    read = _arrays(away) + dataclasses.replace(gradients, calls=int(not away and gradients.calls > 0))
    return params + inputs, params + gradients + inputs, read + back


def _arrays(leaves: Iterable[Leaf]) -> Carried:
    """These arrays, by one call for each layer."""
    sizes = [leaf.nbytes for leaf in leaves]
    return Carried(sum(sizes), len(sizes), min(len(sizes), 1))


def predict(
    far: Sequence[Leaf],
    state_bytes: float,
    cost: Cost,
    num_layers: int,
    count: int,
    activations: Tier,
    tiers: Tiers,
    kept: KeptGradients = FREED,
    drive: Drive = NO_DRIVE,
    copies: CopyCosts = FREE,
) -> StepWay | None:
    away = [*far, *drive.leaves]
    moved = sum(leaf.nbytes for leaf in away)
    params = sum(leaf.nbytes for leaf in away if leaf.is_param)
    back = sum(leaf.nbytes for leaf in away if not leaf.is_frozen)
    # What is on its way to and from the drive: two layers that are read, and as much as the staging memory to write.
    held = moved - drive.nbytes + (2 + _STAGED_LAYERS) * drive.nbytes / num_layers
    stored = num_layers * cost.input_bytes if activations == "host" else 0
    ring = min(stored, 2 * cost.input_bytes)
    carried = _carried(away, kept, stored)
    copying = [copies.on_device(some, num_layers) for some in carried]
    forward = num_layers * cost.forward_seconds + copying[0]
    backward = num_layers * max(0.0, cost.layer_seconds - cost.forward_seconds) + copying[1]
    update = copying[2]  # all that the device does in this loop, or next to it
    if kept.freed:
        in_backward, in_update = Traffic(moved, back, drive.seconds), NOTHING
    else:  # the update comes after backward, and next to no arithmetic hides its copies
        in_backward = Traffic(params, kept.far_bytes, drive.param_seconds)
        in_update = Traffic(moved + kept.far_bytes, back, drive.seconds)
    in_forward = Traffic(params, 0.0, drive.param_seconds)
    left = dataclasses.replace(tiers, host_bytes=max(0.0, tiers.host_bytes - held - kept.far_bytes))
    where = place(stored, ring, forward, backward, left, in_forward, in_backward)
    if where is None:
        return None
    stall = where.stall_seconds + max(0.0, tiers.bus_seconds(in_update) - update, in_update.drive_seconds - update)
    early = params == 0 and kept.far_bytes == 0  # one loop alone reads rows, and they come during forward
    for seconds, traffic in ((forward, in_forward), (backward, in_backward), (update, in_update)):
        stall += _ends(seconds, traffic, tiers, early=early) / num_layers
    inputs = 0 if activations == "host" else num_layers * cost.input_bytes
    device = state_bytes - moved + cost.base_bytes + num_layers * cost.layer_bytes + inputs - kept.far_bytes
    staging = ring + _STAGED_LAYERS * (moved + kept.far_bytes) / num_layers
    launch = cost.base_launch + num_layers * cost.layer_launch
    launch += sum(copies.launching(some, num_layers) for some in carried)
    return StepWay(
        frozenset(leaf.path for leaf in far),
        frozenset(leaf.path for leaf in drive.leaves),
        activations,
        count,
        device + staging,
        staging,
        held + kept.far_bytes + where.host_bytes,
        where.disk_bytes + 2 * drive.nbytes,
        max(launch, cost.base_seconds + forward + backward + update + stall),
        stall,
        sum(copying),
        launch,
    )
