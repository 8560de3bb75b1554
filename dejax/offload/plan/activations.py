"""Keep, recompute or offload, for each layer of a stack or for each named tensor of its layers.

Short stacks are profiled for each choice. Memory and time of a long stack follow by linear extrapolation. Short stacks
fit into the ring and never wait for the bus, so those waits are predicted from measured bandwidths. A stack of unequal
layers has parts of equal ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dejax._platform import on_gpu
from dejax.offload.activations.options import MIN_BYTES
from dejax.offload.activations.residuals import Residual
from dejax.offload.activations.store import ActivationStore
from dejax.offload.activations.transform import offload
from dejax.offload.plan.loops import scan_pieces
from dejax.offload.plan.measure import (
    LayerCost,
    Tiers,
    count_layers,
    device_bandwidth,
    profile_stack,
    residuals_of,
    ring_of,
    scan_layers,
    tiers_of,
    training_step,
)
from dejax.offload.plan.result import Phase, Plan, Way, place

Body = Callable[[Any, Any], Any]
CHOICES = ("offload", "offload inputs", "recompute", "keep")
"""What `plan_stack` may do with the residuals of a layer.

In a plan, the first layers get the first of these choices, because their residuals are needed last and so have the
most time to travel.
"""
INPUT = "(input)"
"""The layer's own input, among the names of a plan."""
UNNAMED = "(unnamed)"
"""Tensors without a name, likewise."""
_TWIN = {"offload": "keep", "offload inputs": "recompute"}
_MOST_WAYS = 4000


@dataclass(frozen=True, slots=True)
class StackPart:
    """Equal layers that follow one another, with the costs of a layer by choice."""

    body: Body
    num_layers: int
    costs: Mapping[str, LayerCost]


def plan_stack(
    body: Body | Sequence[Body],
    params: Any,
    x: Any,
    *,
    budget_bytes: int,
    store: ActivationStore | None = None,
    min_bytes: int = MIN_BYTES,
    choices: Sequence[str] = CHOICES,
) -> Plan:
    """Decides for each layer of a stack whether to keep, offload or recompute its activations within a memory budget.

    It measures the bus and, on the device that holds `x`, short stacks of your layers for each choice, and predicts the
    memory and time of the whole stack. The choices concern a layer's residuals, the tensors that its backward pass
    needs:

    - "offload": all residuals leave the device, as by `offload(body)`.
    - "offload inputs": only the layer's input leaves, and the rest is recomputed, as by
      `offload(jax.checkpoint(body))`.
    - "recompute": the layer's input stays, and the rest is recomputed, as by `jax.checkpoint(body)`.
    - "keep": all residuals stay on the device.

    If the layers are not all equal, pass several parts of equal layers in the order in which they run:
    `plan_stack([dense, moe], [dense_params, moe_params], x, ...)`. Layers that alternate count as one layer together.

    Args:
        body: function `(parameters of one layer, x) -> x`, as for `jax.lax.scan` over the layers; or a list of such
            functions, one for each part.
        params: pytree of arrays [layers, ...] with at least four layers; or a list of such pytrees, one for each part,
            with any number of layers.
        x: input of the first layer. Each part must return an array of the same shape.
        budget_bytes: device memory for the temporaries of a training step (value and gradient of the stack) and for the
            store's ring.
        store: the `ActivationStore` for offloaded tensors. The plan respects its host memory and measures its drive: it
            does not offload more than the drive can take in time. None means the current store, with unlimited host
            memory.
        min_bytes: smaller tensors stay on the device.
        choices: the subset of `CHOICES` to consider.

    Returns:
        The plan: `plan.apply(params, x)` runs the stack, and `print(plan.table())` shows the alternatives.

    Raises:
        ValueError: the stack has fewer than four layers, the numbers of parts differ, or nothing fits the budget; the
            message gives the smallest budget that would.
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
    parts = [
        StackPart(one, count, _costs(one, some, x, store, min_bytes, choices))
        for one, some, count in zip(bodies, each, counts, strict=True)
    ]

    def apply(way: Way, params: Any, x: Any) -> Any:
        each = list(params) if several else [params]
        if len(each) != len(parts):
            raise ValueError(f"plan_stack: `params` of apply must be of {len(parts)} parts, got {len(each)}")
        for number, (part, some) in enumerate(zip(parts, each, strict=True)):
            variants = _variants(part.body, store, min_bytes)
            found = [(variants[choice], _layers(way, choice, number)) for choice in CHOICES]
            pieces = [piece for piece in found if piece[1]]
            x = scan_layers(pieces[0][0], some, x) if len(pieces) == 1 else scan_pieces(pieces, some, x)
        return x

    tiers = tiers_of(store)
    return Plan(
        ways_of(parts, tiers),
        {"device_bytes": budget_bytes},
        tiers,
        tuple(part.costs for part in parts) if several else parts[0].costs,
        {} if several else {choice: cost.stored_bytes for choice, cost in parts[0].costs.items()},
        "plan_stack",
        apply,
        _measuring(apply),
        (lambda way, budget: refined(way, parts, budget, tiers)) if several else None,
    )


def _measuring(apply: Callable[..., Any]) -> Callable[[Way, Any, Any], tuple[float, Callable[[], Any]]]:
    def measure(way: Way, params: Any, x: Any) -> tuple[float, Callable[[], Any]]:
        compiled = training_step(lambda params, x: apply(way, params, x)).lower(params, x).compile()
        return float(compiled.memory_analysis().temp_size_in_bytes), lambda: compiled(params, x)

    return measure


def _costs(
    body: Body, params: Any, x: Any, store: ActivationStore | None, min_bytes: int, choices: Sequence[str]
) -> dict[str, LayerCost]:
    """Profiles the choices."""
    variants = _variants(body, store, min_bytes)
    forward = profile_stack(body, params, x, gradient=False).layer_seconds
    costs: dict[str, LayerCost] = {}
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
        twin = costs.get(_TWIN.get(choice, "")) if on_gpu() else None
        cost = profile_stack(variants[choice], params, x, run=twin is None)
        if twin is not None:
            copies = 4 * sum(sizes) / device_bandwidth()
            cost = dataclasses.replace(cost, base_seconds=twin.base_seconds, layer_seconds=twin.layer_seconds + copies)
        costs[choice] = dataclasses.replace(
            cost, forward_seconds=forward, stored_bytes=sum(sizes), ring_bytes=ring_of(store, sizes, flops)
        )
    return costs


def predict(uses: Sequence[tuple[LayerCost, int]], tiers: Tiers, choices: Mapping[str, Any]) -> Way | None:
    """Predicts memory and time of a stack with a number of layers of each cost; None if the tiers are too small."""
    costs, storing = [cost for cost, _ in uses], [(cost, n) for cost, n in uses if cost.stored_bytes]
    ring = max(cost.ring_bytes for cost in costs)
    forward = Phase(sum(n * cost.forward_seconds for cost, n in storing))
    backward = Phase(sum(n * (cost.layer_seconds - cost.forward_seconds) for cost, n in storing))
    stored = place(sum(n * cost.stored_bytes for cost, n in storing), ring, forward, backward, tiers)
    if stored is None:
        return None
    peak = max(cost.base_bytes for cost in costs) + sum(n * cost.layer_bytes for cost, n in uses) + ring
    seconds = max(cost.base_seconds for cost in costs) + sum(n * cost.layer_seconds for cost, n in uses)
    stall = stored.stall_seconds
    return Way(choices, peak, seconds + stall, stall, ring, stored.host_bytes, stored.disk_bytes)


def _layers(way: Way, choice: str, part: int) -> int:
    """How many layers of a part have a choice."""
    found = way.choices.get(choice, 0)
    return int(found[part] if isinstance(found, tuple) else found)


def _way(parts: Sequence[StackPart], layers: Sequence[Sequence[int]], tiers: Tiers) -> Way | None:
    uses = [
        (part.costs[choice], n)
        for part, some in zip(parts, layers, strict=True)
        for choice, n in zip(CHOICES, some, strict=True)
        if n
    ]
    choices: dict[str, Any] = {}
    for choice, *each in zip(CHOICES, *layers, strict=True):
        if any(each):
            choices[choice] = tuple(each) if len(parts) > 1 else each[0]
    return predict(uses, tiers, choices)


def ways_of(parts: Sequence[StackPart], tiers: Tiers) -> list[Way]:
    """All ways to divide the layers among the choices, in coarser steps for deep stacks and many parts."""
    grid = 24
    while True:
        each = [compositions(part.num_layers, [c in part.costs for c in CHOICES], grid) for part in parts]
        if grid == 1 or len(parts) == 1 or int(np.prod([len(some) for some in each])) <= _MOST_WAYS:
            break
        grid = max(1, grid * 3 // 4)
    found = [_way(parts, layers, tiers) for layers in itertools.product(*each)]
    return [way for way in found if way is not None]


def compositions(total: int, allowed: Sequence[bool], grid: int = 24) -> list[tuple[int, ...]]:
    """All ways to divide `total` layers among the allowed choices, in steps of several layers for deep stacks."""
    step = max(1, total // grid)
    counts = [sorted({*range(0, total + 1, step), total}) if ok else [0] for ok in allowed]
    found = []
    for head in itertools.product(*counts[:-1]):
        rest = total - sum(head)
        if rest >= 0 and (allowed[-1] or rest == 0):
            found.append((*head, rest))
    return found


def refined(way: Way, parts: Sequence[StackPart], budget_bytes: float, tiers: Tiers) -> Way:
    """Gives single layers another choice as long as that saves time within the budget."""
    while True:
        nearby = [_way(parts, layers, tiers) for layers in _neighbours(way, parts)]
        fitting = [w for w in nearby if w is not None and w.device_bytes <= budget_bytes]
        better = min(fitting, key=lambda w: w.seconds, default=way)
        if better.seconds >= way.seconds * (1 - 1e-9):
            return way
        way = better


def _neighbours(way: Way, parts: Sequence[StackPart]) -> Iterator[list[tuple[int, ...]]]:
    layers = [tuple(_layers(way, choice, number) for choice in CHOICES) for number in range(len(parts))]
    for at, part in enumerate(parts):
        for i, j in itertools.permutations([k for k, choice in enumerate(CHOICES) if choice in part.costs], 2):
            if layers[at][i]:
                changed = tuple(n - (k == i) + (k == j) for k, n in enumerate(layers[at]))
                yield [*layers[:at], changed, *layers[at + 1 :]]


def _variants(body: Body, store: ActivationStore | None, min_bytes: int) -> dict[str, Body]:
    recomputing = jax.checkpoint(body)
    return {
        "offload": offload(body, store=store, inputs=1, min_bytes=min_bytes),
        "offload inputs": offload(recomputing, store=store, inputs=1, min_bytes=min_bytes),
        "recompute": recomputing,
        "keep": body,
    }


def plan_names(
    body: Body,
    params: Any,
    x: Any,
    *,
    names: Sequence[str],
    budget_bytes: int,
    store: ActivationStore | None = None,
    min_bytes: int = MIN_BYTES,
) -> Plan:
    """Decides which named activations of a layer to keep, offload or recompute within a memory budget.

    Name tensors inside your layer with `jax.ad_checkpoint.checkpoint_name`. The plan makes one decision for each name,
    which holds in every layer. To decide, it measures short stacks of your layers: with all named tensors saved, with
    none saved, and with all but one. This gives the time to recompute each tensor; the time to offload it follows from
    its size and the measured bandwidths of the bus and the drive.

    Args:
        body: function `(parameters of one layer, x) -> x` that names some of its tensors.
        params: pytree of arrays [layers, ...] with at least four layers.
        x: input of the first layer.
        names: the names to decide about, at most eight. The layer's input is decided about in any case. Tensors without
            a name are recomputed, unless the plan recomputes nothing at all.
        budget_bytes: device memory for the temporaries of a training step (value and gradient of the stack) and for the
            store's ring.
        store: the `ActivationStore` for offloaded tensors, as in `plan_stack`.
        min_bytes: smaller tensors stay on the device.

    Returns:
        The plan: `plan.apply(params, x)` runs the stack, and `print(plan.table())` shows the decisions.

    Raises:
        ValueError: a name does not occur in `body`, there are more than eight names or fewer than four layers, or
            nothing fits the budget.

    >>> import jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from dejax.offload import plan_names
    >>> def body(w, x):
    ...     return x + checkpoint_name(jnp.tanh(x @ w), "hidden") @ w.T
    >>> ws, x = jnp.ones((4, 64, 64)) / 64, jnp.ones((512, 64))
    >>> plan = plan_names(body, ws, x, names=["hidden"], budget_bytes=1 << 30, min_bytes=1)  # doctest: +SKIP
    >>> plan.chosen.choices["hidden"]  # doctest: +SKIP
    """
    num_layers = count_layers(params, "plan_names")
    if not 1 <= len(names) <= 8:
        raise ValueError(f"plan_names: `names` must have one to eight names, got {len(names)}")
    forward = profile_stack(body, params, x, gradient=False).layer_seconds
    tiers = tiers_of(store)
    ways: list[Way | None] = []
    bytes_of: dict[str, int] = {}
    costs: dict[str, LayerCost] = {}
    for saved in _candidates(names):
        variant = _saving(body, saved)
        residuals, flops = residuals_of(variant, params, x, min_bytes)
        sizes = {name: [r.nbytes for r in residuals if _named(r, names) == name] for name in (INPUT, *names)}
        if not bytes_of:  # the first candidate saves all
            bytes_of = {name: sum(some) for name, some in sizes.items()}
            _require_all(bytes_of, min_bytes)
        cost = dataclasses.replace(profile_stack(variant, params, x), forward_seconds=forward)
        costs["all tensors" if saved is None else ", ".join(sorted(saved)) or "none"] = cost
        for offloaded in _subsets([name for name, some in sizes.items() if some]):
            stored = [size for name in offloaded for size in sizes[name]]
            layer = _offloading(cost, sum(stored), ring_of(store, stored, flops))
            kept = (INPUT, *names, UNNAMED) if saved is None else (INPUT, *saved)
            choices = {name: "keep" if name in kept else "recompute" for name in (INPUT, *names, UNNAMED)}
            ways.append(predict([(layer, num_layers)], tiers, choices | dict.fromkeys(offloaded, "offload")))

    def layer_of(way: Way) -> Body:
        return _layer(body, way, store, min_bytes)

    def apply(way: Way, params: Any, x: Any) -> Any:
        return scan_layers(layer_of(way), params, x)

    def with_compiled_bytes(way: Way, _: float) -> Way:
        cost = profile_stack(layer_of(way), params, x, run=False)
        return dataclasses.replace(
            way, device_bytes=cost.base_bytes + num_layers * cost.layer_bytes + way.staging_bytes
        )

    return Plan(
        [way for way in ways if way is not None],
        {"device_bytes": budget_bytes},
        tiers,
        costs,
        bytes_of,
        "plan_names",
        apply,
        _measuring(apply),
        with_compiled_bytes,
    )


def _offloading(cost: LayerCost, stored_bytes: int, ring_bytes: int) -> LayerCost:
    """The cost of a layer that offloads some of what it saves."""
    copies = 4 * stored_bytes / device_bandwidth() if ring_bytes else 0.0
    return dataclasses.replace(
        cost,
        layer_bytes=cost.layer_bytes - stored_bytes,
        layer_seconds=cost.layer_seconds + copies,
        stored_bytes=stored_bytes,
        ring_bytes=ring_bytes,
    )


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(len(names) + 1))


def _require_all(bytes_of: Mapping[str, int], min_bytes: int) -> None:
    missing = [name for name, nbytes in bytes_of.items() if not nbytes and name != INPUT]
    if missing:
        raise ValueError(
            f"plan_names: no tensor of {min_bytes} bytes or more that backward needs is named {missing[0]!r}; give "
            "names that checkpoint_name gives inside `body`, outside of functions that are jitted by themselves"
        )


def _named(residual: Residual, names: Sequence[str]) -> str:
    return INPUT if residual.is_input else next((name for name in names if name in residual.names), "")


def _candidates(names: Sequence[str]) -> list[frozenset[str] | None]:
    """The sets of names to try, whose tensors are saved. With None the backward pass recomputes nothing."""
    everything = frozenset(names)
    some = [everything - {name} for name in names] if len(names) > 1 else []
    return [everything, *some, frozenset(), None]


def _saving(body: Body, saved: frozenset[str] | None) -> Body:
    if saved is None:
        return body
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*sorted(saved)))


def _layer(body: Body, way: Way, store: ActivationStore | None, min_bytes: int) -> Body:
    """`body` as a layer that runs with the choices of a way."""
    saved = frozenset(name for name, choice in way.choices.items() if choice != "recompute" and name != INPUT)
    offloaded = frozenset(name for name, choice in way.choices.items() if choice == "offload")
    inner = _saving(body, None if UNNAMED in saved else saved)
    if not offloaded:
        return inner

    def goes(residual: Residual) -> bool:
        return INPUT in offloaded if residual.is_input else bool(residual.names & offloaded)

    return offload(inner, policy=goes, store=store, inputs=1, min_bytes=min_bytes)
