"""Keep, recompute or offload, for each layer of a stack, from measured times and sizes and a memory budget.

A stack of equal layers under `jax.lax.scan` is profiled with two short stacks for each choice. Memory and time of a
long stack follow by linear extrapolation. Short stacks fit into the ring and never wait for the bus, so those waits are
predicted from measured bandwidths. A stack of unequal layers has parts of equal ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dejax.offload.activations.store import ActivationStore
from dejax.offload.activations.transform import MIN_BYTES, offload
from dejax.offload.plan.loops import scan_pieces
from dejax.offload.plan.profile import (
    SHORT,
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
from dejax.offload.plan.ways import Cost, Plan, Use, fastest, nothing_fits, predict

Body = Callable[[Any, Any], Any]
CHOICES = ("offload", "offload inputs", "recompute", "keep")
"""In the order of the layers that get them: tensors of the first layers are fetched last and have most time."""
_TWIN = {"offload": "keep", "offload inputs": "recompute"}
_MOST_WAYS = 4000


@dataclass(frozen=True, slots=True)
class Prediction:
    """A way to run the stack, with its predicted memory and time.

    Attributes:
        layers: number of layers for each of `CHOICES`; of several parts, those of the first part, then of the second.
        peak_bytes: temporaries of the program and the device's ring.
        seconds: time of a step.
        stall_seconds: part of it that waits for the bus or the drive.
        placement: where the stored tensors lie.

    >>> import jax.numpy as jnp
    >>> from dejax.offload import CHOICES, plan_stack
    >>> ws, x = jnp.ones((4, 16, 16)) / 16, jnp.ones((32, 16))
    >>> plan = plan_stack(lambda w, x: x + jnp.tanh(x @ w), ws, x, budget_bytes=1 << 30)  # doctest: +SKIP
    >>> dict(zip(CHOICES, plan.chosen.layers)), plan.chosen.peak_bytes  # doctest: +SKIP
    """

    layers: tuple[int, ...]
    peak_bytes: float
    seconds: float
    stall_seconds: float
    placement: Placement

    def parts(self) -> list[tuple[int, ...]]:
        """`layers`, part by part."""
        return [self.layers[at : at + len(CHOICES)] for at in range(0, len(self.layers), len(CHOICES))]


@dataclass(frozen=True, slots=True)
class Part:
    """Equal layers that follow one another.

    Attributes:
        body: of a layer.
        num_layers: how many.
        costs: by choice.
        forward_seconds: of a layer.
    """

    body: Body
    num_layers: int
    costs: Mapping[str, Cost]
    forward_seconds: float

    def uses(self, layers: Sequence[int]) -> list[Use]:
        return [
            Use(self.costs[choice], n, self.forward_seconds) for choice, n in zip(CHOICES, layers, strict=True) if n
        ]


@dataclass(slots=True)
class StackPlan(Plan[Prediction]):
    """A plan for a stack, made by `plan_stack`: a choice for each layer.

    Attributes:
        parts: of the stack, each of equal layers.

    >>> import jax.numpy as jnp
    >>> from dejax.offload import CHOICES, plan_stack
    >>> ws, x = jnp.ones((4, 16, 16)) / 16, jnp.ones((32, 16))
    >>> plan = plan_stack(lambda w, x: x + jnp.tanh(x @ w), ws, x, budget_bytes=1 << 30)  # doctest: +SKIP
    >>> print(plan.table())  # doctest: +SKIP
    >>> y = plan.apply(ws, x)  # doctest: +SKIP
    """

    parts: tuple[Part, ...]
    _store: ActivationStore | None
    _min_bytes: int
    _several: bool  # params is a sequence with the parameters of each part

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Of the first part, by choice."""
        return self.parts[0].costs

    def apply(self, params: Any, x: Any) -> Any:
        """Runs the stack as planned: `scan(body, params, x)`, in one loop for each choice and part.

        Args:
            params: pytree of arrays [layers, ...]; of several parts, a sequence of these.
            x: the first layer's input.
        """
        each = list(params) if self._several else [params]
        if len(each) != len(self.parts):
            raise ValueError(f"StackPlan.apply: `params` must be of {len(self.parts)} parts, got {len(each)}")
        for part, layers, some in zip(self.parts, self.chosen.parts(), each, strict=True):
            x = _run(_variants(part.body, self._store, self._min_bytes), layers, some, x)
        return x

    def _ring_bytes(self) -> int:
        uses = _uses(self.parts, self.chosen.parts())
        return max((use.cost.ring_bytes for use in uses), default=0)

    def _marked(self) -> Mapping[str, list[Prediction]]:
        found: dict[str, list[Prediction]] = {}
        for way in self.ways:
            if (choice := _alone(way)) is not None:
                found.setdefault(f"all {choice}", []).append(way)
        return found

    def _rows(self) -> list[tuple[str, Prediction]]:
        rows = [(_describe(way), way) for way in self.ways if _alone(way) is not None]
        return [*rows, (f"**{_describe(self.chosen)}**", self.chosen)]


def plan_stack(
    body: Body | Sequence[Body],
    params: Any,
    x: Any,
    *,
    budget_bytes: int,
    store: ActivationStore | None = None,
    min_bytes: int = MIN_BYTES,
    choices: Sequence[str] = CHOICES,
) -> StackPlan:
    """Decides for each layer of a stack how its backward pass gets its residuals.

    Profiles on the device that holds `x`: two short stacks for each choice, forward alone, and the bus. A layer does
    one of `CHOICES`:

    - "offload": all residuals are moved, `offload(body)`.
    - "offload inputs": its input is moved and the rest recomputed, `offload(jax.checkpoint(body))`.
    - "recompute": its input stays and the rest is recomputed, `jax.checkpoint(body)`.
    - "keep": all residuals stay.

    Unequal layers are given in parts of equal ones, in the order in which they run: `plan_stack([dense, moe],
    [dense_params, moe_params], x, ...)`. Layers that alternate are one layer together.

    Args:
        body: (params of one layer, x) -> x, as in `jax.lax.scan` over layers. Or a sequence of these, for each part.
        params: pytree of arrays [layers, ...], at least four layers. Or a sequence of these, of any number of layers.
        x: the first layer's input; each part must return an array of this shape.
        budget_bytes: for temporaries of a training step (value and gradient of the stack) and the device's ring.
        store: where offloaded tensors go. The plan respects its host memory, and measures its drive: it does not
            offload more than the drive takes in time. None: the current store, with unlimited host memory.
        min_bytes: smaller tensors stay.
        choices: the ones of `CHOICES` to consider.

    Returns:
        The plan: `plan.apply(params, x)` runs the stack, `print(plan.table())` shows the alternatives.

    Raises:
        ValueError: the stack has fewer than four layers, parts and parameters do not match, or no way fits the budget;
            the message has the least budget.
    """
    if unknown := set(choices) - set(CHOICES):
        raise ValueError(f"plan_stack: `choices` must be of {CHOICES}, got {sorted(unknown)}")
    several = not callable(body)
    bodies, each = (list(body), list(params)) if not callable(body) else ([body], [params])
    if not bodies or len(bodies) != len(each):
        raise ValueError(
            f"plan_stack: `params` must have the parameters of each part, got {len(each)} for {len(bodies)} bodies"
        )
    counts = [jax.tree.leaves(some)[0].shape[0] for some in each] if several else [count_layers(params, "plan_stack")]
    parts = []
    for one, some, count in zip(bodies, each, counts, strict=True):
        some = _enough(some, count)
        costs = _costs(one, some, x, store, min_bytes, choices)
        parts.append(Part(one, count, costs, forward_seconds(one, some, x)))
    tiers = tiers_of(store)
    ways = _ways_of(parts, tiers)
    chosen = fastest(ways, budget_bytes, _prefer)
    if chosen is None:
        raise nothing_fits("plan_stack", ways, budget_bytes, _describe)
    if several:
        chosen = _refined(chosen, parts, budget_bytes, tiers)
    return StackPlan(
        chosen,
        ways,
        budget_bytes,
        sum(counts),
        tiers,
        parts=tuple(parts),
        _store=store,
        _min_bytes=min_bytes,
        _several=several,
    )


def _enough(params: Any, count: int) -> Any:
    """At least as many layers as short stacks have: the same ones again."""
    if count >= max(SHORT):
        return params
    return jax.tree.map(lambda leaf: leaf[np.arange(max(SHORT)) % count], params)


def _costs(
    body: Body, params: Any, x: Any, store: ActivationStore | None, min_bytes: int, choices: Sequence[str]
) -> dict[str, Cost]:
    """Profiles the choices."""
    variants = _variants(body, store, min_bytes)
    costs: dict[str, Cost] = {}
    for choice in reversed(CHOICES):  # those that store nothing first
        if choice not in choices:
            continue
        sizes: list[int] = []
        flops = 0.0
        if choice in _TWIN:
            residuals, flops = residuals_of(body if choice == "offload" else jax.checkpoint(body), params, x, min_bytes)
            sizes = [residual.nbytes for residual in residuals]
        # On a GPU an offloading stack is compiled, but not run: it could wait half a minute for a slow drive. It takes
        # the time of the choice that computes the same without offloading, and of two copies on the device.
        twin = costs.get(_TWIN.get(choice, "")) if jax.default_backend() == "gpu" else None
        profiled = short_stacks(variants[choice], params, x, run=twin is None)
        cost = Cost(*profiled, sum(sizes), ring_of(store, sizes, flops))
        if twin is not None:
            copies = 4 * cost.stored_bytes / device_bandwidth()
            cost = dataclasses.replace(cost, base_seconds=twin.base_seconds, layer_seconds=twin.layer_seconds + copies)
        costs[choice] = cost
    return costs


def _prefer(way: Prediction) -> Any:
    """Among equally fast ways, keep as many layers as possible."""
    return tuple(sum(some) for some in zip(*way.parts(), strict=True))[::-1], -way.peak_bytes


def _uses(parts: Sequence[Part], layers: Sequence[Sequence[int]]) -> list[Use]:
    return [use for part, some in zip(parts, layers, strict=True) for use in part.uses(some)]


def _way(parts: Sequence[Part], layers: Sequence[Sequence[int]], tiers: Tiers) -> Prediction | None:
    found = predict(_uses(parts, layers), tiers)
    if found is None:
        return None
    flat = tuple(n for some in layers for n in some)
    return Prediction(flat, found.peak_bytes, found.seconds, found.stall_seconds, found.placement)


def _ways_of(parts: Sequence[Part], tiers: Tiers) -> list[Prediction]:
    grid = 24
    while True:
        each = [_compositions(part.num_layers, [c in part.costs for c in CHOICES], grid) for part in parts]
        if grid == 1 or int(np.prod([len(some) for some in each])) <= max(_MOST_WAYS, len(each[0]) * (len(each) == 1)):
            break
        grid = max(1, grid * 3 // 4)
    found = [_way(parts, layers, tiers) for layers in itertools.product(*each)]
    return [way for way in found if way is not None]


def _refined(way: Prediction, parts: Sequence[Part], budget_bytes: float, tiers: Tiers) -> Prediction:
    """Gives single layers another choice as long as that saves time within the budget."""
    while True:
        nearby = [_way(parts, layers, tiers) for layers in _neighbours(way, parts)]
        fitting = [w for w in nearby if w is not None and w.peak_bytes <= budget_bytes]
        better = min(fitting, key=lambda w: w.seconds, default=way)
        if better.seconds >= way.seconds * (1 - 1e-9):
            return way
        way = better


def _neighbours(way: Prediction, parts: Sequence[Part]) -> list[list[tuple[int, ...]]]:
    found = []
    for at, (part, layers) in enumerate(zip(parts, way.parts(), strict=True)):
        for i, j in itertools.permutations([k for k, choice in enumerate(CHOICES) if choice in part.costs], 2):
            if layers[i]:
                changed = tuple(n - (k == i) + (k == j) for k, n in enumerate(layers))
                found.append([*way.parts()[:at], changed, *way.parts()[at + 1 :]])
    return found


def _compositions(total: int, allowed: Sequence[bool], grid: int = 24) -> list[tuple[int, ...]]:
    """All ways to divide `total` layers among the allowed choices, in steps of several layers for deep stacks."""
    step = max(1, total // grid)
    counts = [sorted({*range(0, total + 1, step), total}) if ok else [0] for ok in allowed]
    found = []
    for head in itertools.product(*counts[:-1]):
        rest = total - sum(head)
        if rest >= 0 and (allowed[-1] or rest == 0):
            found.append((*head, rest))
    return found


def _alone(way: Prediction) -> str | None:
    """The choice of all layers, where they have one."""
    used = {choice for some in way.parts() for choice, n in zip(CHOICES, some, strict=True) if n}
    return used.pop() if len(used) == 1 else None


def _describe(way: Prediction) -> str:
    return "; ".join(
        ", ".join(f"{n} {choice}" for n, choice in zip(some, CHOICES, strict=True) if n) for some in way.parts()
    )


def _variants(body: Body, store: ActivationStore | None, min_bytes: int) -> dict[str, Body]:
    recomputing = jax.checkpoint(body)
    return {
        "offload": offload(body, store=store, inputs=1, min_bytes=min_bytes),
        "offload inputs": offload(recomputing, store=store, inputs=1, min_bytes=min_bytes),
        "recompute": recomputing,
        "keep": body,
    }


def _run(variants: dict[str, Body], layers: tuple[int, ...], params: Any, x: Any) -> Any:
    pieces = [(variants[choice], count) for choice, count in zip(CHOICES, layers, strict=True) if count]
    return scan_layers(pieces[0][0], params, x) if len(pieces) == 1 else scan_pieces(pieces, params, x)
