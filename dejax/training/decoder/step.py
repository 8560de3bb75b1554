"""The training step of the decoder: optimizer, accumulation, offload, and where everything lies on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax._optional import optional
from dejax._sums import narrowed, wide, zeros
from dejax.offload import StackState, StackStep, offload, stack_step
from dejax.training.decoder import model
from dejax.training.decoder.config import DecoderConfig

with optional("optax", of="dejax.training"):
    import optax

OFFLOAD = ("none", "remat", "inputs", "all")
STATE = ("device", "moments", "all")
GRADIENTS = ("freed", "device", "host")
_AXIS = "data"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a decoder is trained.

    Attributes:
        batch: sequences in a step, over all devices.
        sequence: tokens in a sequence.
        steps: of the whole run; the learning rate ends there.
        accumulate: parts of a batch that are computed one after the other; their gradients are added.
        rate: highest learning rate.
        final_rate: the last learning rate, as a share of `rate`; a cosine leads there.
        warmup: steps until the highest learning rate.
        weight_decay: of AdamW, not for norms.
        clip: largest norm of all gradients; 0: no limit.
        offload: "none": residuals stay; "remat": recomputed; "inputs": blocks' inputs are stored, the rest recomputed;
            "all": all are stored.
        state: "device": parameters and moments stay there. "moments", "all": moments, or parameters too, lie in host
            memory, and the step goes layer by layer (`dejax.offload.stack_step`).
        gradients: for a step layer by layer. "freed": a layer is updated as soon as its gradient is there, and `clip`
            takes the norm of the last step (or of the gradients so far, if it is larger). "device", "host": gradients
            are kept there until all are known, and `clip` is exact.
        attention: "xla", "cudnn", or None: cuDNN where it works.
        min_bytes: smaller residuals stay on the device.

    Raises:
        ValueError: a choice does not fit the others.
    """

    batch: int = 8
    sequence: int = 128
    steps: int = 200
    accumulate: int = 1
    rate: float = 1e-3
    final_rate: float = 0.1
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    offload: str = "none"
    state: str = "device"
    gradients: Literal["freed", "device", "host"] = "freed"
    attention: Literal["xla", "cudnn"] | None = None
    min_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("offload", self.offload, OFFLOAD),
            ("state", self.state, STATE),
            ("gradients", self.gradients, GRADIENTS),
        ):
            if value not in allowed:
                raise ValueError(f"Recipe: `{name}` must be one of {', '.join(allowed)}, got {value!r}")
        if self.accumulate < 1 or self.batch % self.accumulate:
            raise ValueError(
                f"Recipe: `accumulate` must divide `batch`, got accumulate={self.accumulate} and batch={self.batch}"
            )
        if self.state != "device" and self.offload == "all":
            raise ValueError(
                "Recipe: `offload` must be 'remat' or 'inputs' where the step goes layer by layer, got 'all'"
            )

    def schedule(self) -> Any:
        """The learning rate by step: linear warm-up, then a cosine."""
        # Optax wants at least one step of decay.
        end = max(self.warmup + 1, self.steps)
        return optax.warmup_cosine_decay_schedule(0.0, self.rate, self.warmup, end, self.rate * self.final_rate)

    def transformation(self) -> Any:
        """AdamW with the schedule; a step layer by layer limits the norm itself."""
        adamw = optax.adamw(self.schedule(), b2=0.95, weight_decay=self.weight_decay, mask=_decayed)
        whole = self.clip and self.state == "device"
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw) if whole else adamw


@dataclass(frozen=True)
class Trainer:
    """A model's training step.

    Attributes:
        config: the shapes.
        recipe: as given.
        init: key -> state.
        step: (state, tokens int32 [batch, sequence + 1]) -> (state, loss); the state is donated.
        params_of: state -> parameters, as `model.init_params` makes them.
        put: tokens -> the same on the devices.
    """

    config: DecoderConfig
    recipe: Recipe
    init: Callable[[Array], Any]
    step: Callable[[Any, Any], tuple[Any, Array]]
    params_of: Callable[[Any], Any]
    put: Callable[[Any], Any]


def make_trainer(config: DecoderConfig, recipe: Recipe, *, mesh: Mesh | None = None) -> Trainer:
    """The training step of a decoder.

    Args:
        config: the shapes.
        recipe: how it is trained.
        mesh: devices along one axis, "data", over which parameters, optimizer state and batches are divided (FSDP).
            None: one device.

    Raises:
        ValueError: the batch cannot be divided over the mesh.
    """
    if mesh is not None and recipe.batch // recipe.accumulate % mesh.size:
        raise ValueError(
            f"make_trainer: `mesh` must divide the sequences that are computed at a time, got {mesh.size} devices for "
            f"{recipe.batch // recipe.accumulate} sequences"
        )
    parts = _layerwise(config, recipe, mesh) if recipe.state != "device" else _whole(config, recipe, mesh)
    return Trainer(config, recipe, *parts, functools.partial(_put, mesh))


def make_mesh(devices: int) -> Mesh:
    """The first devices along one axis, "data".

    Raises:
        ValueError: there are fewer.
    """
    if not 1 <= devices <= jax.device_count():
        raise ValueError(f"make_mesh: `devices` must be 1 to {jax.device_count()}, got {devices}")
    return jax.make_mesh((devices,), (_AXIS,), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])


def shardings(tree: Any, mesh: Mesh, *, stacked: bool = False) -> Any:
    """For each array its sharding: the largest axis that the mesh divides, never the axis of layers.

    Args:
        tree: arrays or their shapes.
        mesh: devices along "data".
        stacked: all arrays are [layers, ...]; otherwise those under the key "layers" are.
    """

    def of(path: Any, leaf: Any) -> NamedSharding:
        first = 1 if stacked or any(getattr(key, "key", None) == "layers" for key in path) else 0
        axes = [axis for axis in range(first, len(leaf.shape)) if leaf.shape[axis] % mesh.size == 0]
        spec: list[str | None] = [None] * len(leaf.shape)
        if axes:
            spec[max(axes, key=lambda axis: leaf.shape[axis])] = _AXIS
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(of, tree)


def _decayed(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path[-1:]), params)


def _batch_sharding(mesh: Mesh | None) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(_AXIS))


def _put(mesh: Mesh | None, tokens: Any) -> Any:
    return jax.device_put(tokens, _batch_sharding(mesh))


def _offloaded(config: DecoderConfig, recipe: Recipe, mesh: Mesh | None) -> model.Block:
    block = model.make_block(config, recipe.attention, batch_sharding=_batch_sharding(mesh))
    if recipe.offload in ("remat", "inputs"):
        block = jax.checkpoint(block)
    if recipe.offload in ("inputs", "all"):
        block = offload(block, inputs=1, min_bytes=recipe.min_bytes)  # the one line
    return block


def _whole(config: DecoderConfig, recipe: Recipe, mesh: Mesh | None) -> tuple[Any, Any, Any]:
    """The step with the gradient of the whole model."""
    tx, block = recipe.transformation(), _offloaded(config, recipe, mesh)

    def make(key: Array) -> dict[str, Any]:
        params = model.init_params(config, key)
        return {"params": params, "moments": tx.init(params)}

    shapes = jax.eval_shape(make, jax.random.key(0))
    where = None if mesh is None else shardings(shapes, mesh)

    def step(state: Any, tokens: Array) -> tuple[Any, Array]:
        def value_and_grad(tokens: Array) -> Any:
            return jax.value_and_grad(lambda p: model.loss(config, p, tokens, block))(state["params"])

        value, gradient = _accumulated(value_and_grad, tokens, recipe.accumulate, mesh)
        updates, moments = tx.update(gradient, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    how: dict[str, Any] = {} if where is None else {"in_shardings": (where, None), "out_shardings": (where, None)}
    init = jax.jit(make, **({} if where is None else {"out_shardings": where}))
    return init, jax.jit(step, donate_argnums=0, **how), lambda state: state["params"]


def _accumulated(fn: Callable[[Array], Any], tokens: Array, parts: int, mesh: Mesh | None) -> Any:
    """The mean of `fn` over parts of a batch, computed one after the other and added in float32."""
    if parts == 1:
        return fn(tokens)
    divided = tokens.reshape(parts, -1, tokens.shape[1])
    if mesh is not None:  # each part over all devices
        spec = NamedSharding(mesh, PartitionSpec(None, _AXIS))
        divided = jax.lax.with_sharding_constraint(divided, spec)

    def add(total: Any, part: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, wide(fn(part))), None

    shapes = jax.eval_shape(fn, divided[0])
    total, _ = jax.lax.scan(add, zeros(shapes), divided)
    return narrowed(jax.tree.map(lambda x: x / parts, total), shapes)


def make_stack_step(config: DecoderConfig, recipe: Recipe, mesh: Mesh | None = None) -> StackStep:
    """The decoder's step layer by layer."""
    return stack_step(
        lambda outer, tokens: model.embed(config, outer, tokens[:, :-1]),
        model.make_block(config, recipe.attention, batch_sharding=_batch_sharding(mesh)),
        lambda outer, x, tokens: model.cross_entropy(model.logits(config, outer, x), tokens[:, 1:]),
        recipe.transformation(),
        params="host" if recipe.state == "all" else "device",
        moments="host" if recipe.state != "device" else "device",
        activations="host" if recipe.offload == "inputs" else "device",
        microbatches=recipe.accumulate,
        clip_norm=recipe.clip or None,
        gradients=recipe.gradients,
    )


def _layerwise(config: DecoderConfig, recipe: Recipe, mesh: Mesh | None) -> tuple[Any, Any, Any]:
    """The step that updates each layer in backward."""
    step = make_stack_step(config, recipe, mesh)
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))
    places = dict(zip(sorted(shapes["layers"]), step.places(step.params, shapes["layers"]), strict=True))

    where = None if mesh is None else shardings(shapes, mesh)

    def one(key: Array, *names: str) -> Array:
        value = _one(config, key, names)
        return value if where is None else jax.device_put(value, functools.reduce(lambda t, n: t[n], names, where))

    def init(key: Array) -> StackState:
        # Array by array: the device may not hold all of them.
        outer, layers = {}, {}
        for name in shapes:
            if name != "layers":
                outer[name] = one(key, name)
        for name, place in places.items():
            value = one(key, "layers", name)
            layers[name] = jax.device_put(value, jax.memory.Space.Host) if place == "host" else value
        return step.init(outer, layers)

    jitted: list[Any] = []

    def run(state: StackState, tokens: Any) -> tuple[StackState, Array]:
        if not jitted:
            jitted.append(step.jit(state))
        return jitted[0](state, tokens)

    return init, run, lambda state: {**state.outer, "layers": state.layers}


@functools.partial(jax.jit, static_argnums=(0, 2))
def _one(config: DecoderConfig, key: Array, names: tuple[str, ...]) -> Array:
    found: Any = model.init_params(config, key)
    for name in names:
        found = found[name]
    return found


__all__ = ["GRADIENTS", "OFFLOAD", "STATE", "Recipe", "Trainer", "make_mesh", "make_stack_step", "make_trainer"]
