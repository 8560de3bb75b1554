"""Train a GPT on text as bytes; flags put its activations, parameters and moments in host memory.

    python examples/train_gpt.py                                     # a small model, a few minutes on a CPU
    python examples/train_gpt.py --text FOLDER --steps 2000          # your own text
    python examples/train_gpt.py --sample "def " --length 300        # text from the last checkpoint
    python examples/train_gpt.py --offload inputs --out out/inputs   # blocks' inputs in host memory
    python examples/train_gpt.py --offload all --out out/disk --store DIR --host-bytes 1000000000  # the rest on disk
    python examples/train_gpt.py --size 12b --state moments --batch 8 --sequence 4096 --checkpoint 0   # one H200
    python examples/train_gpt.py --mesh 4                            # FSDP over four devices
    python examples/train_gpt.py --compare inputs --out out/compare  # with and without: the same losses, one plot

The model is a decoder as language models have them now: rotary embeddings, grouped-query attention, SwiGLU, RMSNorm,
bfloat16 arithmetic with float32 parameters. This file has all of it, from the shapes to the command. A run writes
OUT/losses.json, OUT/loss.svg, OUT/settings.json and checkpoints. `--resume` continues from the last checkpoint with the
same batches; without it a run replaces the earlier one in OUT. A step whose gradients are not finite is skipped and
counted. `docs/large_models.md` says which flags a large model needs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax.offload import ActivationStore, StackState, StackStep, offload, stack_step
from dejax.training import Checkpoints

# ------------------------------------------------------------------------------------------------------- the shapes


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes of a decoder.

    Attributes:
        layers: number of blocks.
        width: of a token's vector.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`: query heads share them in groups.
        head_dim: width of a head, even.
        hidden: width inside of the feed-forward part.
        vocabulary: number of tokens; 256 for bytes.
        dtype: of the arithmetic; parameters are float32.
        rope_base: the longest wavelength of the rotary embedding is about `2 pi rope_base` tokens.
        norm_eps: added to the mean square in RMSNorm.

    Raises:
        ValueError: a number does not fit the others.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 384
    vocabulary: int = 256
    dtype: str = "bfloat16"
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"DecoderConfig: `{name}` must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig: `kv_heads` must divide `heads`, got kv_heads={self.kv_heads} and heads={self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"DecoderConfig: `head_dim` must be even, got {self.head_dim}; rotary pairs its elements")

    @property
    def layer_params(self) -> int:
        """Number of parameters of a block."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.hidden + 2 * self.width

    @property
    def num_params(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer_params + 2 * self.vocabulary * self.width + self.width

    def flops_per_token(self, sequence: int) -> float:
        """Floating-point operations of forward and backward for a token, without recomputation ("model FLOPs").

        Six for each parameter of a matrix product; causal attention reads half of the sequence on average.
        """
        products = self.layers * (self.layer_params - 2 * self.width) + self.vocabulary * self.width
        attention = self.layers * 2 * self.heads * self.head_dim * sequence / 2
        return 6.0 * (products + attention)

    def replace(self, **changes: Any) -> DecoderConfig:
        """The same with other values."""
        return dataclasses.replace(self, **changes)


def _size(layers: int, width: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> DecoderConfig:
    return DecoderConfig(layers, width, heads, kv_heads, head_dim, hidden)


SIZES: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(),
    "125m": _size(20, 768, 12, 4, 64, 2048),
    "350m": _size(32, 1024, 16, 4, 64, 2816),
    "1b": _size(22, 2048, 16, 4, 128, 5632),
    "3b": _size(30, 3072, 24, 8, 128, 8192),
    "7b": _size(32, 4096, 32, 8, 128, 14336),
    "12b": _size(44, 5120, 40, 8, 128, 13824),
    "16b": _size(40, 6144, 48, 8, 128, 16384),
    "27b": _size(60, 6656, 52, 4, 128, 17920),
}
"""Configurations by name; the name is the number of parameters, rounded. The vocabulary is bytes, so nearly all of them
are in the blocks."""


# -------------------------------------------------------------------------------------------------------- the model

Block = Callable[[Any, Array], Array]


def init_params(config: DecoderConfig, key: Array) -> dict[str, Any]:
    """Random parameters: normal with deviation 0.02, what is added to the residual stream smaller by sqrt(2 layers).

    Returns:
        {"embed": [vocabulary, width], "layers": {name: [layers, ...]}, "norm": [width], "unembed": [width, vocabulary]}
    """
    layers, width, hidden = config.layers, config.width, config.hidden
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "query": (width, queries),
        "key": (width, keys),
        "value": (width, keys),
        "out": (queries, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    numbers = jax.random.split(key, len(shapes) + 2)
    added = (2 * layers) ** -0.5
    stack = {
        name: jax.random.normal(number, (layers, *shape)) * (0.02 * (added if name in ("out", "down") else 1.0))
        for (name, shape), number in zip(shapes.items(), numbers, strict=False)
    }
    stack["attention_norm"] = jnp.ones((layers, width))
    stack["mlp_norm"] = jnp.ones((layers, width))
    return {
        "embed": 0.02 * jax.random.normal(numbers[-1], (config.vocabulary, width)),
        "layers": stack,
        "norm": jnp.ones(width),
        "unembed": 0.02 * jax.random.normal(numbers[-2], (width, config.vocabulary)),
    }


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, in float32; the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x: Array, positions: Array, base: float) -> Array:
    """Rotates pairs of elements (i, i + dim / 2) by `position * base^(-2 i / dim)`.

    Args:
        x: [batch, sequence, heads, dim].
        positions: int [sequence].
        base: of the wavelengths.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency  # [sequence, 1, half]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def implementation(config: DecoderConfig, wanted: str | None = None) -> str:
    """What is wanted; otherwise "cudnn" (flash attention) where a GPU computes in 16 bits, and "xla" elsewhere."""
    if wanted is not None:
        return wanted
    return "cudnn" if jax.default_backend() == "gpu" and config.dtype in ("bfloat16", "float16") else "xla"


def queries_keys_values(config: DecoderConfig, p: Any, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """The heads of a block's input, [batch, sequence, heads, head_dim]; queries and keys are rotated."""
    h = rms_norm(x, p["attention_norm"], config.norm_eps)
    parts = []
    for name in ("query", "key", "value"):
        part = h @ p[name].astype(h.dtype)
        parts.append(part.reshape(*x.shape[:2], -1, config.head_dim))
    q, k = (rotary(part, positions, config.rope_base) for part in parts[:2])
    return q, k, parts[2]


def feed_forward(config: DecoderConfig, p: Any, x: Array) -> Array:
    """SwiGLU: `(silu(h gate) * (h up)) down`, of the normed input."""
    h = rms_norm(x, p["mlp_norm"], config.norm_eps)
    gate, up = h @ p["gate"].astype(h.dtype), h @ p["up"].astype(h.dtype)
    return (jax.nn.silu(gate) * up) @ p["down"].astype(h.dtype)


def make_block(
    config: DecoderConfig, attention: str | None = None, *, batch_sharding: NamedSharding | None = None
) -> Block:
    """A block: (parameters of one layer, x [batch, sequence, width]) -> x.

    Args:
        config: the shapes.
        attention: "xla", "cudnn", or None for `implementation`.
        batch_sharding: on a mesh, the sharding of an activation, by its first axis. Without it XLA may divide queries
            and keys by the axis of their divided parameters, which cuDNN's attention refuses.
    """
    how = implementation(config, attention)

    def placed(x: Array) -> Array:
        return x if batch_sharding is None else jax.lax.with_sharding_constraint(x, batch_sharding)

    def block(p: Any, x: Array) -> Array:
        x = placed(x)
        q, k, v = map(placed, queries_keys_values(config, p, x, jnp.arange(x.shape[1])))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)  # type: ignore[call-overload]
        x = x + placed(mixed).reshape(*x.shape[:2], -1) @ p["out"].astype(x.dtype)
        return placed(x + feed_forward(config, p, x))

    return block


def embed(config: DecoderConfig, params: Any, tokens: Array) -> Array:
    """Vectors of tokens, [batch, sequence, width] in the dtype of the arithmetic."""
    return params["embed"].astype(config.dtype)[tokens]


def logits(config: DecoderConfig, params: Any, x: Array) -> Array:
    """float32 [batch, sequence, vocabulary] of the last block's output."""
    h = rms_norm(x, params["norm"], config.norm_eps)
    return jnp.matmul(h, params["unembed"].astype(h.dtype), preferred_element_type=jnp.float32)


def forward(config: DecoderConfig, params: Any, tokens: Array, block: Block | None = None) -> Array:
    """Logits of the token after each token.

    Args:
        config: the shapes.
        params: as `init_params` makes them.
        tokens: int [batch, sequence].
        block: (parameters of one layer, x) -> x; by default `make_block(config)`.

    Returns:
        float32 [batch, sequence, vocabulary].
    """
    run = make_block(config) if block is None else block
    x, _ = jax.lax.scan(lambda x, p: (run(p, x), None), embed(config, params, tokens), params["layers"])
    return logits(config, params, x)


def cross_entropy(scores: Array, labels: Array) -> Array:
    """Mean of `log sum exp(scores) - scores[label]`, in nats."""
    picked = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, -1) - picked)


def loss(config: DecoderConfig, params: Any, tokens: Array, block: Block | None = None) -> Array:
    """Cross-entropy of `tokens[:, 1:]` given what precedes them; tokens: int [batch, sequence + 1]."""
    return cross_entropy(forward(config, params, tokens[:, :-1], block), tokens[:, 1:])


# --------------------------------------------------------------------------------------------------------- the text


def read_text(folder: Path | None = None, limit: int | None = None) -> bytes:
    """The files of a folder, joined in the order of their names; by default the standard library's modules.

    Args:
        folder: every file below it that holds no zero byte at its begin is read as text.
        limit: of the bytes that are read.

    Raises:
        FileNotFoundError: the folder is not there, or has no text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    if not root.is_dir():
        raise FileNotFoundError(f"{root} must be a folder of text; give another")
    if folder is None:
        files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    else:
        files = sorted(p for p in root.rglob("*") if p.is_file())
    parts, total = [], 0
    for path in files:
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        parts.append(content)
        total += len(content)
        if limit is not None and total >= limit:
            break
    if total == 0:
        raise FileNotFoundError(f"{root} must hold files of text, found none; give another folder")
    return b"".join(parts)[:limit]


def batch_at(text: bytes, step: int, *, seed: int, batch: int, sequence: int) -> np.ndarray:
    """Random windows, int32 [batch, sequence + 1]; they depend only on the seed and the step.

    Raises:
        ValueError: the text is shorter than a window.
    """
    data = np.frombuffer(text, np.uint8)
    if len(data) <= sequence:
        raise ValueError(f"batch_at: the text must have more than {sequence} bytes, got {len(data)}; give more text")
    begins = np.random.default_rng((seed, step)).integers(0, len(data) - sequence, batch)
    return np.stack([data[b : b + sequence + 1] for b in begins]).astype(np.int32)


# --------------------------------------------------------------------------------------------------------- the step

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
class TrainStep:
    """A model's training step.

    Attributes:
        config: the shapes.
        recipe: as given.
        init: key -> state.
        step: (state, tokens int32 [batch, sequence + 1]) -> (state, loss); the state is donated.
        params_of: state -> parameters, as `init_params` makes them.
        put: tokens -> the same on the devices.
    """

    config: DecoderConfig
    recipe: Recipe
    init: Callable[[Array], Any]
    step: Callable[[Any, Any], tuple[Any, Array]]
    params_of: Callable[[Any], Any]
    put: Callable[[Any], Any]


def make_trainer(config: DecoderConfig, recipe: Recipe, *, mesh: Mesh | None = None) -> TrainStep:
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
    return TrainStep(config, recipe, *parts, functools.partial(_put, mesh))


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


def _offloaded(config: DecoderConfig, recipe: Recipe, mesh: Mesh | None) -> Block:
    block = make_block(config, recipe.attention, batch_sharding=_batch_sharding(mesh))
    if recipe.offload in ("remat", "inputs"):
        block = jax.checkpoint(block)
    if recipe.offload in ("inputs", "all"):
        block = offload(block, inputs=1, min_bytes=recipe.min_bytes)  # the one line
    return block


def _whole(config: DecoderConfig, recipe: Recipe, mesh: Mesh | None) -> tuple[Any, Any, Any]:
    """The step with the gradient of the whole model. It is skipped where the gradient is not finite."""
    tx, block = recipe.transformation(), _offloaded(config, recipe, mesh)

    def make(key: Array) -> dict[str, Any]:
        params = init_params(config, key)
        return {"params": params, "moments": tx.init(params), "skipped": jnp.zeros((), jnp.int32)}

    shapes = jax.eval_shape(make, jax.random.key(0))
    where = None if mesh is None else shardings(shapes, mesh)

    def step(state: Any, tokens: Array) -> tuple[Any, Array]:
        def value_and_grad(tokens: Array) -> Any:
            return jax.value_and_grad(lambda p: loss(config, p, tokens, block))(state["params"])

        value, gradient = _accumulated(value_and_grad, tokens, recipe.accumulate, mesh)
        updates, moments = tx.update(gradient, state["moments"], state["params"])
        after = {"params": optax.apply_updates(state["params"], updates), "moments": moments}
        before = {name: state[name] for name in after}
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves((value, gradient))]).all()
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        return {**kept, "skipped": state["skipped"] + ~finite}, value

    how: dict[str, Any] = {} if where is None else {"in_shardings": (where, None), "out_shardings": (where, None)}
    init = jax.jit(make, **({} if where is None else {"out_shardings": where}))
    return init, jax.jit(step, donate_argnums=0, **how), lambda state: state["params"]


def _accumulated(fn: Callable[[Array], Any], tokens: Array, parts: int, mesh: Mesh | None) -> Any:
    """The mean of `fn`, whose results are float32, over parts of a batch, computed one after the other."""
    if parts == 1:
        return fn(tokens)
    divided = tokens.reshape(parts, -1, tokens.shape[1])
    if mesh is not None:  # each part over all devices
        spec = NamedSharding(mesh, PartitionSpec(None, _AXIS))
        divided = jax.lax.with_sharding_constraint(divided, spec)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, divided[0]))
    total, _ = jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, fn(part)), None), zeros, divided)
    return jax.tree.map(lambda x: x / parts, total)


def make_stack_step(config: DecoderConfig, recipe: Recipe, mesh: Mesh | None = None) -> StackStep:
    """The decoder's step layer by layer."""
    return stack_step(
        lambda outer, tokens: embed(config, outer, tokens[:, :-1]),
        make_block(config, recipe.attention, batch_sharding=_batch_sharding(mesh)),
        lambda outer, x, tokens: cross_entropy(logits(config, outer, x), tokens[:, 1:]),
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
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
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
    found: Any = init_params(config, key)
    for name in names:
        found = found[name]
    return found


# ------------------------------------------------------------------------------------------------- text from a model


@functools.partial(jax.jit, static_argnames=("config", "length", "top_k"))
def generate(
    params: Any,
    prompt: Array,
    key: Array,
    *,
    config: DecoderConfig,
    length: int,
    temperature: float | Array = 1.0,
    top_k: int = 0,
) -> Array:
    """Continues a prompt.

    Args:
        params: of the model.
        prompt: int [batch, n], n at least 1.
        key: of the random numbers; the same key gives the same text.
        config: the shapes.
        length: number of tokens to add.
        temperature: scores are divided by it; 0: the most likely token.
        top_k: only so many most likely tokens are drawn; 0: all.

    Returns:
        int32 [batch, n + length], the prompt included.
    """
    batch, given = prompt.shape
    if given < 1:
        raise ValueError("generate: `prompt` must have at least one token, got none")
    total = given + length
    shape = (config.layers, batch, total, config.kv_heads, config.head_dim)
    cache = (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
    prompt = jnp.pad(prompt.astype(jnp.int32), ((0, 0), (0, length)))

    def step(carry: Any, at: Array) -> tuple[Any, Array]:
        token, cache = carry
        scores, cache = _next_scores(config, params, token, cache, at)
        drawn = _draw(scores, jax.random.fold_in(key, at), temperature, top_k)
        token = jnp.where(at + 1 < given, prompt[:, jnp.minimum(at + 1, total - 1)], drawn)
        return (token, cache), token

    _, tokens = jax.lax.scan(step, (prompt[:, 0], cache), jnp.arange(total - 1))
    return jnp.concatenate([prompt[:, :1], tokens.T], axis=1)


def _next_scores(config: DecoderConfig, params: Any, token: Array, cache: Any, at: Array) -> tuple[Array, Any]:
    """Scores [batch, vocabulary] after the token at position `at`, and the cache with its keys and values."""

    def layer(x: Array, xs: Any) -> tuple[Array, Any]:
        p, keys, values = xs
        q, k, v = queries_keys_values(config, p, x, at[None])
        keys, values = (jax.lax.dynamic_update_slice_in_dim(c, n, at, 1) for c, n in ((keys, k), (values, v)))
        seen = (jnp.arange(keys.shape[1]) <= at)[None, None, None]
        mixed = jax.nn.dot_product_attention(q, keys, values, mask=seen, implementation="xla")
        x = x + mixed.reshape(*x.shape[:2], -1) @ p["out"].astype(x.dtype)
        return x + feed_forward(config, p, x), (keys, values)

    x = embed(config, params, token[:, None])
    x, cache = jax.lax.scan(layer, x, (params["layers"], *cache))
    return logits(config, params, x)[:, 0], cache


def _draw(scores: Array, key: Array, temperature: float | Array, top_k: int) -> Array:
    if top_k:
        least = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))[0][..., -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    drawn = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, scores.argmax(-1)).astype(jnp.int32)


# ---------------------------------------------------------------------------------------------------------- a run

# What a resumed run may change: its length and where things lie. "moments" and "all" have the same arrays.
FREE = ("steps", "offload", "state", "gradients", "min_bytes")


def train(trainer: TrainStep, options: argparse.Namespace, out: Path, name: str) -> list[float]:
    """Trains to the recipe's last step; returns the loss of each step, those before a resume included."""
    recipe, text = trainer.recipe, read_text(options.text)
    checkpoints = Checkpoints(out, FREE)
    layout = "whole" if recipe.state == "device" else "by layer"
    settings = {**dataclasses.asdict(trainer.config), **dataclasses.asdict(recipe)}
    checkpoints.begin({**settings, "seed": options.seed, "layout": layout}, resume=options.resume)
    losses: list[float] = []
    with contextlib.ExitStack() as stack:
        state = trainer.init(jax.random.key(options.seed))
        if options.resume and checkpoints.latest(options.seed) is not None:
            state, losses = restored(checkpoints, options.seed, state)
            print(f"{name} goes on after step {len(losses)}", flush=True)
        store = recording = None
        if recipe.offload in ("inputs", "all"):
            store = stack.enter_context(ActivationStore(options.store, host_bytes=options.host_bytes))
            recording = stack.enter_context(store.record()) if options.plot_store else None
        pending: list[Any] = []
        began = time.perf_counter()
        for at in range(len(losses), recipe.steps):
            tokens = batch_at(text, at, seed=options.seed, batch=recipe.batch, sequence=recipe.sequence)
            state, loss = trainer.step(state, trainer.put(tokens))
            pending.append(loss)
            done = at + 1
            if done % options.report == 0 or done == recipe.steps:
                losses += [float(value) for value in jax.device_get(pending)]
                seconds = (time.perf_counter() - began) / len(pending)
                print(_line(trainer, name, losses, seconds, state, store), flush=True)
                pending, began = [], time.perf_counter()
            if options.checkpoint and not pending and (done % options.checkpoint == 0 or done == recipe.steps):
                checkpoints.save(options.seed, done, lasting(state), losses)
                began = time.perf_counter()
        if store is not None:
            print(store.summary(endurance_bytes=options.endurance))
            if recording is not None:
                recording.stop()
                recording.plot(out / "store.svg")
                recording.trace(out / "store.trace.json")
    (out / "losses.json").write_text(json.dumps({"mode": name, "losses": losses}), encoding="utf-8")
    return losses


def _line(trainer: TrainStep, name: str, losses: list[float], seconds: float, state: Any, store: Any) -> str:
    recipe = trainer.recipe
    tokens = recipe.batch * recipe.sequence
    flops = trainer.config.flops_per_token(recipe.sequence) * tokens
    parts = [f"{name} step {len(losses):5}/{recipe.steps}", f"loss {losses[-1]:.4f}"]
    parts.append(f"{tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e12:,.2f} TFLOP/s")
    parts += [] if store is None else [store.stats().line()]
    skipped = int(state.skipped if isinstance(state, StackState) else state["skipped"])
    parts += [f"{skipped} steps skipped: gradients not finite"] if skipped else []
    return "  ".join(parts)


def lasting(state: Any) -> Any:
    """What a checkpoint holds: not the memory for gradients, which a step fills anew."""
    return state._replace(gradients=None) if isinstance(state, StackState) else state


def restored(checkpoints: Checkpoints, seed: int, state: Any) -> tuple[Any, list[float]]:
    """The state and the losses of the last checkpoint; arrays lie where those of `state` do."""
    found, losses = checkpoints.restore(seed, lasting(state))
    return found._replace(gradients=state.gradients) if isinstance(state, StackState) else found, losses


def sample(trainer: TrainStep, options: argparse.Namespace) -> None:
    """Prints text that continues a prompt, from the last checkpoint in `--out`.

    Raises:
        FileNotFoundError: there is none.
    """
    checkpoints = Checkpoints(options.out)
    if not (seeds := checkpoints.seeds()):
        raise FileNotFoundError(f"{options.out} must hold a checkpoint; train with --checkpoint, or name another --out")
    state, _ = restored(checkpoints, seeds[0], trainer.init(jax.random.key(0)))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(lambda x: jax.device_put(x, here), trainer.params_of(state))
    prompt = np.frombuffer(options.sample.encode(), np.uint8).astype(np.int32)[None]
    how = {"config": trainer.config, "length": options.length, "temperature": options.temperature}
    found = generate(params, prompt, jax.random.key(options.seed), **how)
    print(bytes(np.asarray(found[0]).clip(0, 255).astype(np.uint8)).decode("utf-8", errors="replace"))


def describe(config: DecoderConfig, recipe: Recipe) -> str:
    """One line: parameters, tokens and operations of a step."""
    tokens = recipe.batch * recipe.sequence
    flops = config.flops_per_token(recipe.sequence) * tokens
    return (
        f"{config.num_params:,} parameters: {config.layers} layers, {config.width} wide, {config.heads} heads over "
        f"{config.kv_heads} keys; {tokens:,} tokens and {flops / 1e12:,.3g} TFLOP a step; attention by "
        f"{implementation(config, recipe.attention)}"
    )


def plot(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws losses by step."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------ the command

COUNTERPART = {"inputs": "remat", "all": "none"}
"""The run without offload that each mode is compared with."""
_SHAPES = ("layers", "width", "heads", "kv_heads", "head_dim", "hidden")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a GPT on text as bytes, with offload by one flag.")
    group = parser.add_argument_group("model")
    names = ", ".join(f"{name} ({config.num_params / 1e6:,.0f} M)" for name, config in SIZES.items())
    group.add_argument("--size", choices=tuple(SIZES), default="tiny", help=f"parameters: {names}")
    for name in _SHAPES:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of that of --size")
    group.add_argument("--dtype", help="of the arithmetic: bfloat16, float32; parameters are float32")
    group.add_argument("--attention", choices=("xla", "cudnn"), help="by default cudnn where it works")
    group = parser.add_argument_group("training")
    group.add_argument("--text", type=Path, help="a folder of text; by default the standard library's sources")
    group.add_argument("--batch", type=int, default=8, help="sequences in a step")
    group.add_argument("--sequence", type=int, default=128, help="bytes in a sequence")
    group.add_argument("--steps", type=int, default=200, help="training steps")
    group.add_argument("--accumulate", type=int, default=1, help="parts of a batch, one after the other")
    group.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    group.add_argument("--warmup", type=int, default=20, help="steps of warm-up; a cosine follows")
    group.add_argument("--weight-decay", type=float, default=0.1, help="of AdamW")
    group.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients; 0: no limit")
    group.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--offload",
        choices=OFFLOAD,
        default="none",
        help="none: keep residuals; remat: recompute; inputs: store blocks' inputs; all: store all",
    )
    group.add_argument(
        "--state",
        choices=STATE,
        default="device",
        help="moments, all: Adam's moments, or parameters too, in host memory; each layer is updated in backward",
    )
    group.add_argument(
        "--gradients",
        choices=GRADIENTS,
        default="freed",
        help="with --state moments or all. freed: --clip takes the last step's norm; device, host: kept there, exact",
    )
    group.add_argument("--mesh", type=int, help="devices over which parameters and batches are divided (FSDP)")
    group.add_argument("--store", type=Path, help="a folder for a disk tier of activations")
    group.add_argument("--host-bytes", type=int, help="limit of host memory for activations")
    group.add_argument("--min-bytes", type=int, default=1 << 14, help="smaller tensors stay on the device")
    group.add_argument("--endurance", type=float, help="bytes that the drive of --store is rated for (its TBW)")
    group = parser.add_argument_group("run")
    group.add_argument(
        "--compare", choices=tuple(COUNTERPART), help="train with and without offload, and compare each loss"
    )
    group.add_argument("--out", type=Path, default=Path("out/gpt"), help="folder of checkpoints, curves and plots")
    group.add_argument("--report", type=int, default=20, help="steps between lines")
    group.add_argument("--checkpoint", type=int, default=100, help="steps between checkpoints, a multiple of --report")
    group.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    group.add_argument("--plot-store", action="store_true", help="draw where stored tensors were, to OUT/store.svg")
    group.add_argument("--sample", metavar="PROMPT", help="no training: continue this text from the last checkpoint")
    group.add_argument("--length", type=int, default=200, help="bytes to sample")
    group.add_argument("--temperature", type=float, default=0.8, help="of sampling; 0: the likeliest byte")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("batch", "sequence", "accumulate", "report", "checkpoint"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if options.steps < 0:
        parser.error(f"--steps must be at least 0, got {options.steps}")
    if options.checkpoint % options.report:
        parser.error(f"--checkpoint {options.checkpoint} must be a multiple of --report {options.report}")
    stores = options.offload in ("inputs", "all") or options.compare is not None
    if (options.store or options.host_bytes or options.plot_store) and not stores:
        parser.error("--store, --host-bytes and --plot-store need --offload inputs or --offload all")
    if options.store and not options.store.is_dir():
        parser.error(f"--store must be a folder, got {options.store}; create it")
    if options.compare and options.state != "device":
        parser.error(f"--compare must be used with --state device, got {options.state}")
    if options.sample == "":
        parser.error("--sample must be a text of at least one byte, got an empty one")


def config_of(options: argparse.Namespace) -> DecoderConfig:
    """The shapes: those of `--size`, changed by other options.

    Raises:
        ValueError: the shapes do not fit.
    """
    config = SIZES[options.size]
    changes: dict[str, Any] = {name: getattr(options, name) for name in (*_SHAPES, "dtype") if getattr(options, name)}
    if "width" in changes and "head_dim" not in changes:
        heads = changes.get("heads", config.heads)
        if changes["width"] % heads:
            raise ValueError(f"--width {changes['width']} must be a multiple of --heads {heads}, or give --head-dim")
        changes["head_dim"] = changes["width"] // heads
    if "width" in changes and "hidden" not in changes:
        changes["hidden"] = 3 * changes["width"]
    if "heads" in changes and "kv_heads" not in changes and changes["heads"] % config.kv_heads:
        changes["kv_heads"] = changes["heads"]
    return config.replace(**changes)


def recipe_of(options: argparse.Namespace, mode: str) -> Recipe:
    """The recipe that the options name, with this mode of offload."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Recipe) if field.name in options}
    return Recipe(**{**given, "offload": mode})


def run(options: argparse.Namespace, mode: str, out: Path) -> list[float]:
    """Trains, or with `--sample` prints text; returns the losses.

    Raises:
        ValueError: options that do not fit each other, or the run that is resumed.
        FileNotFoundError: no text, or no checkpoint.
    """
    config, recipe = config_of(options), recipe_of(options, mode)
    mesh = None if options.mesh is None else make_mesh(options.mesh)
    trainer = make_trainer(config, recipe, mesh=mesh)
    if options.sample is not None:
        sample(trainer, options)
        return []
    print(describe(config, recipe), flush=True)
    return train(trainer, options, out, mode)


def compare(options: argparse.Namespace) -> int:
    """Trains with and without offload; the status is 0 if all losses are equal."""
    # Both programs must use the same kernels and round in the same places: offload changes where fusions end.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true --xla_allow_excess_precision=false"
    )
    names = {COUNTERPART[options.compare]: "without offload", options.compare: "with offload"}
    curves = {name: run(options, mode, options.out / mode) for mode, name in names.items()}
    plot(curves, options.out / "loss.svg")
    without, with_offload = curves.values()
    different = [i for i, (a, b) in enumerate(zip(without, with_offload, strict=True)) if a != b]
    first = f", first at {different[0]}" if different else ""
    print(f"{len(without)} steps, losses that differ: {len(different)}{first}")
    return 1 if different else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        if options.compare is not None:
            return compare(options)
        losses = run(options, options.offload, options.out)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    if losses:
        plot({options.offload: losses}, options.out / "loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
