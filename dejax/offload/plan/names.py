"""Keep, recompute or offload, for each named tensor of a layer (`plan_stack` decides for each layer).

The set of saved names decides what is recomputed. It is profiled: short stacks with all names saved, with none, and
with each but one. Whether a saved tensor stays or is offloaded follows from its size, the bus and the drive.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dejax.offload.activations.residuals import Residual
from dejax.offload.activations.store import ActivationStore
from dejax.offload.activations.transform import MIN_BYTES, offload
from dejax.offload.plan.profile import (
    Placement,
    Tiers,
    count_layers,
    device_bandwidth,
    forward_seconds,
    residuals_of,
    ring_of,
    scan_layers,
    short_stacks,
    tiers_of,
)
from dejax.offload.plan.ways import Cost, Plan, Use, fastest, moved_bytes, nothing_fits, predict

INPUT = "(input)"
"""The layer's own input, among the names of a plan."""


@dataclass(frozen=True, slots=True)
class NamesWay:
    """A way to run each layer, with its predicted memory and time.

    Attributes:
        saved: names that are not recomputed; None: nothing is recomputed, `jax.checkpoint` is not used.
        offloaded: the saved names that are offloaded.
        peak_bytes: temporaries of the program and the device's ring.
        seconds: time of a step.
        stall_seconds: part of it that waits for the bus or the drive.
        ring_bytes: size of the device's ring.
        placement: where the stored tensors lie.

    >>> import jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from dejax.offload import plan_names
    >>> def body(w, x):
    ...     return x + checkpoint_name(jnp.tanh(x @ w), "hidden") @ w.T
    >>> ws, x = jnp.ones((4, 64, 64)) / 64, jnp.ones((512, 64))
    >>> plan = plan_names(body, ws, x, names=["hidden"], budget_bytes=1 << 30, min_bytes=1)  # doctest: +SKIP
    >>> plan.chosen.offloaded, plan.chosen.peak_bytes  # doctest: +SKIP
    """

    saved: frozenset[str] | None
    offloaded: frozenset[str]
    peak_bytes: float
    seconds: float
    stall_seconds: float
    ring_bytes: int
    placement: Placement

    def choice(self, name: str) -> str:
        """What happens to a name: "offload", "keep" or "recompute"."""
        if name in self.offloaded:
            return "offload"
        return "keep" if name == INPUT or self.saved is None or name in self.saved else "recompute"


@dataclass(frozen=True, slots=True)
class _Profile:
    """The cost of a set of saved names.

    Attributes:
        base_bytes, layer_bytes: temporaries of a stack of n layers: base_bytes + n * layer_bytes.
        base_seconds, layer_seconds: likewise, the time of a training step.
        sizes: of the residuals, by name.
        flops: of a layer's forward pass.
    """

    base_bytes: float
    layer_bytes: float
    base_seconds: float
    layer_seconds: float
    sizes: dict[str, list[int]]
    flops: float

    def sizes_of(self, names: Iterable[str]) -> list[int]:
        return [size for name in names for size in self.sizes[name]]


@dataclass(slots=True)
class NamesPlan(Plan[NamesWay]):
    """A plan for the named tensors of a layer, made by `plan_names`.

    Attributes:
        bytes_of: a layer's bytes by name.

    >>> import jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from dejax.offload import plan_names
    >>> def body(w, x):
    ...     return x + checkpoint_name(jnp.tanh(x @ w), "hidden") @ w.T
    >>> ws, x = jnp.ones((4, 64, 64)) / 64, jnp.ones((512, 64))
    >>> plan = plan_names(body, ws, x, names=["hidden"], budget_bytes=1 << 30, min_bytes=1)  # doctest: +SKIP
    >>> print(plan.table())  # doctest: +SKIP
    >>> plan.bytes_of["hidden"]  # doctest: +SKIP
    """

    bytes_of: dict[str, int]
    _body: Callable[[Any, Any], Any]
    _store: ActivationStore | None
    _min_bytes: int

    @property
    def layer(self) -> Callable[[Any, Any], Any]:
        """`body` as planned: (params of one layer, x) -> x."""
        return _make(self._body, self.chosen, self._store, self._min_bytes)

    def apply(self, params: Any, x: Any) -> Any:
        """Runs the stack as planned: `scan(body, params, x)`."""
        return scan_layers(self.layer, params, x)

    def _ring_bytes(self) -> int:
        return self.chosen.ring_bytes

    def _choices(self) -> list[str]:
        lines = ["| tensor | MiB a layer | choice |", "| --- | --- | --- |"]
        for name, nbytes in self.bytes_of.items():
            lines.append(f"| {name} | {nbytes / 2**20:.0f} | {self.chosen.choice(name)} |")
        return [*lines, ""]

    def _marked(self) -> Mapping[str, list[NamesWay]]:
        alone: dict[str, list[NamesWay]] = {}
        for way in self.ways:
            does = {way.choice(name) for name in self.bytes_of if name != INPUT}
            if len(does) == 1:
                alone.setdefault(f"{does.pop()} all", []).append(way)
        return alone


def plan_names(
    body: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    *,
    names: Sequence[str],
    budget_bytes: int,
    store: ActivationStore | None = None,
    min_bytes: int = MIN_BYTES,
) -> NamesPlan:
    """Decides for each named tensor of a layer whether it is kept, recomputed or offloaded, alike in every layer.

    Args:
        body: (params of one layer, x) -> x, with `jax.ad_checkpoint.checkpoint_name` in it.
        params: pytree of arrays [layers, ...], at least four layers.
        x: the first layer's input.
        names: of the tensors to decide about, at most eight. The plan decides about the input, too. Tensors without a
            name are recomputed, unless the plan recomputes nothing.
        budget_bytes: for temporaries of a training step (value and gradient of the stack) and the device's ring.
        store: where offloaded tensors go, see `plan_stack`.
        min_bytes: smaller tensors stay.

    Returns:
        The plan: `plan.apply(params, x)` runs the stack, `print(plan.table())` shows the choices.

    Raises:
        ValueError: a name is not found, there are too many or too few layers, or no way fits the budget.

    >>> import jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from dejax.offload import plan_names
    >>> def body(w, x):
    ...     return x + checkpoint_name(jnp.tanh(x @ w), "hidden") @ w.T
    >>> ws, x = jnp.ones((4, 64, 64)) / 64, jnp.ones((512, 64))
    >>> plan = plan_names(body, ws, x, names=["hidden"], budget_bytes=1 << 30, min_bytes=1)  # doctest: +SKIP
    >>> y = plan.apply(ws, x)  # doctest: +SKIP
    """
    num_layers = count_layers(params, "plan_names")
    if not 1 <= len(names) <= 8:
        raise ValueError(f"plan_names: `names` must have one to eight names, got {len(names)}")
    profiles = _profiles(body, params, x, names, min_bytes)
    forward = forward_seconds(body, params, x)
    tiers = tiers_of(store)
    ways: list[NamesWay] = []
    for saved, cost in profiles.items():
        can_go = [name for name, sizes in cost.sizes.items() if sizes]
        for count in range(len(can_go) + 1):
            for offloaded in itertools.combinations(can_go, count):
                ring = ring_of(store, cost.sizes_of(offloaded), cost.flops)
                way = _predict(saved, frozenset(offloaded), cost, num_layers, forward, ring, tiers)
                ways += [] if way is None else [way]
    bytes_of = {name: sum(sizes) for name, sizes in profiles[frozenset(names)].sizes.items()}
    if not ways:
        raise nothing_fits("plan_names", ways, budget_bytes, repr)
    plan = NamesPlan(
        ways[0],
        ways,
        budget_bytes,
        num_layers,
        tiers,
        bytes_of=bytes_of,
        _body=body,
        _store=store,
        _min_bytes=min_bytes,
    )
    return _choose(plan, params, x)


def _profiles(
    body: Callable[[Any, Any], Any], params: Any, x: Any, names: Sequence[str], min_bytes: int
) -> dict[frozenset[str] | None, _Profile]:
    """The cost of each candidate set of saved names."""
    profiles: dict[frozenset[str] | None, _Profile] = {}
    for saved in _candidates(names):
        variant = _saving(body, saved)
        residuals, flops = residuals_of(variant, params, x, min_bytes)
        sizes = {name: [r.nbytes for r in residuals if _named(r, names) == name] for name in (INPUT, *names)}
        if not profiles and (missing := [name for name in names if not sizes[name]]):  # the first candidate saves all
            raise ValueError(
                f"plan_names: no tensor of {min_bytes} bytes or more that backward needs is named {missing[0]!r}; give "
                "names that checkpoint_name gives inside `body`, outside of functions that are jitted by themselves"
            )
        profiles[saved] = _Profile(*short_stacks(variant, params, x), sizes, flops)
    return profiles


def _predict(
    saved: frozenset[str] | None,
    offloaded: frozenset[str],
    cost: _Profile,
    num_layers: int,
    forward: float,
    ring: int,
    tiers: Tiers,
) -> NamesWay | None:
    stored = sum(cost.sizes_of(offloaded))
    copies = 4 * stored / device_bandwidth() if ring else 0.0
    seconds = cost.layer_seconds + copies
    layer = Cost(cost.base_bytes, cost.layer_bytes - stored, cost.base_seconds, seconds, stored, ring)
    found = predict([Use(layer, num_layers, forward)], tiers)
    if found is None:
        return None
    times = found.peak_bytes, found.seconds, found.stall_seconds
    return NamesWay(saved, offloaded, *times, ring, found.placement)


def _choose(plan: NamesPlan, params: Any, x: Any) -> NamesPlan:
    """Chooses the fastest way within the budget. Its memory is taken from the compiler, and must fit, too."""
    left = list(plan.ways)
    # Among equally fast ways, move as little as possible.
    while (best := fastest(left, plan.budget_bytes, lambda w: -moved_bytes(w) - w.peak_bytes * 1e-6)) is not None:
        plan.chosen = best
        base, layer_bytes, *_ = short_stacks(plan.layer, params, x, run=False)
        peak = base + plan.num_layers * layer_bytes + best.ring_bytes
        plan.chosen = dataclasses.replace(best, peak_bytes=peak)
        if peak <= plan.budget_bytes:
            return plan
        left.remove(best)
    choices = lambda way: {name: way.choice(name) for name in plan.bytes_of}  # noqa: E731
    raise nothing_fits("plan_names", plan.ways, plan.budget_bytes, choices)


def _named(residual: Residual, names: Sequence[str]) -> str:
    if residual.is_input:
        return INPUT
    return next((name for name in names if name in residual.names), "")


def _candidates(names: Sequence[str]) -> list[frozenset[str] | None]:
    everything = frozenset(names)
    some = [everything - {name} for name in names] if len(names) > 1 else []
    return [everything, *some, frozenset(), None]


def _saving(body: Callable[[Any, Any], Any], saved: frozenset[str] | None) -> Callable[[Any, Any], Any]:
    if saved is None:
        return body
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*sorted(saved)))


def _make(
    body: Callable[[Any, Any], Any], way: NamesWay, store: ActivationStore | None, min_bytes: int
) -> Callable[[Any, Any], Any]:
    inner = _saving(body, way.saved)
    if not way.offloaded:
        return inner

    def goes(residual: Residual) -> bool:
        return INPUT in way.offloaded if residual.is_input else bool(residual.names & way.offloaded)

    return offload(inner, policy=goes, store=store, inputs=1, min_bytes=min_bytes)
