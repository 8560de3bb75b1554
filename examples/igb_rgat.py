"""MLPerf's R-GAT on IGB's heterogeneous graph, in mini-batches, with features and edges in host memory or on a drive.

    python examples/igb_rgat.py                          # a small random graph: minutes on a CPU
    python examples/igb_rgat.py --scale 0.1 --batch 1024 --pipeline 32 --steps 1000 --device-gb 40   # on a GPU
    python examples/igb_rgat.py --scale 1 --gpus 4 --device-gb 100 --batch 1024 --pipeline 32 --steps 1000  # on 4 GPUs
    python examples/igb_rgat.py --data FOLDER --size medium --batch 1024 --pipeline 32 --steps 5000  # IGB's own files
    python examples/igb_rgat.py --data FOLDER --size large --drive /fast/igb --cache-gb 100  # more than host memory has
    python examples/igb_rgat.py --resume --steps 40                        # go on; the same losses as without a pause

Without `--data` the graph is random with IGB's counts times `--scale`: it shows speed, and there is nothing to learn.
A run writes OUT/results.json, OUT/curves.png, OUT/settings.json and checkpoints.

The model has three layers of 4 x 128 heads. For each relation r, from u to v, and each head:

    z = W_r h                                   (one W_r for both ends, no bias)
    e_uv = LeakyReLU_0.2(a_r . z_u + b_r . z_v)
    h'_v = sum over r of (sum over u of softmax(e)_uv z_u + bias_r)

with the softmax over the edges of v in relation r, and heads side by side. Between layers follow LeakyReLU (slope 0.01)
and dropout. Logits are a linear map of the seeds' last values. 15, 10 and 5 neighbours are drawn from each relation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from dejax import distributed, rgnn
from dejax.datasets import IGBShape, fill_rows, load_igb, random_rows_on_device, write_drive_table
from dejax.host_gather import DeviceTable, DriveTable, HostTable, PeerTable, SplitTable
from dejax.minibatch import (
    Block,
    Capacities,
    FeatureStore,
    HeteroTopology,
    MiniBatch,
    NodeFeatures,
    SampledBlocks,
    find_capacities,
    hot_rows,
    pipelined_steps,
    random_topology,
    sample_blocks,
    sampled_step,
    seed_batches,
    step_keys,
)
from dejax.offload import offload
from dejax.rgnn import library
from dejax.training import Checkpoints

EdgeType = tuple[str, str, str]
SEED_TYPE, SYMMETRIC = "paper", "cites"
NUM_CLASSES = 2983
BETWEEN_SLOPE = 0.01
"""Of the LeakyReLU between layers."""
_STARTS_SHARE = 1 / 12  # of the device's memory, for the first edge of each receiver and relation
_SLOT_BYTES, _PAGE = 4, 4096
_LOG = logging.getLogger(__name__)
_TRAIN_SHARE, _VALID_SHARE = 94_605_581 / 269_346_174, 0.1

# -------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True)
class RGATConfig:
    """The sizes of the model; by default those of MLPerf.

    Attributes:
        edge_types: the relations.
        node_types: the node types, in the order of the graph.
        in_features: width of the features.
        hidden: width of the layers, all heads together.
        heads: heads of a layer.
        layers: number of layers.
        classes: number of classes.
        dropout: share of the values between layers that is dropped.
        dtype: of the arithmetic; parameters are float32.
        backend: backend of the compiler: "auto", "pallas" or "xla".
        precision: of products: see `dejax.rgnn.Options`.
    """

    edge_types: tuple[EdgeType, ...]
    node_types: tuple[str, ...]
    in_features: int = 1024
    hidden: int = 512
    heads: int = 4
    layers: int = 3
    classes: int = 2983
    dropout: float = 0.2
    dtype: str = "bfloat16"
    backend: str = "auto"
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"`hidden` must be a multiple of `heads`, got {self.hidden} and {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and below 1, got {self.dropout}")


def init(key: Array, config: RGATConfig) -> dict[str, Any]:
    """Parameters, float32: `layers`, each with `weight` [R, H, k, d], `attention_src`, `attention_dst` [R, H, d] and
    `bias` [R, H * d]; `head` with `weight` [hidden, classes] and `bias` [classes].

    Initial values are normal with Glorot's variance times 2 for weights and attention vectors, as in DGL's GATConv; 0
    for biases; uniform within k^-1/2 for the linear map.
    """
    relations, heads, width = len(config.edge_types), config.heads, config.hidden // config.heads
    layers = []
    for number in range(config.layers):
        k = config.hidden if number else config.in_features
        of_weight, of_src, of_dst = jax.random.split(jax.random.fold_in(key, number), 3)
        scale = 2 / (k + config.hidden) ** 0.5
        vector = 2 / ((heads + 1) * width) ** 0.5
        layers.append(
            {
                "weight": scale * jax.random.normal(of_weight, (relations, heads, k, width)),
                "attention_src": vector * jax.random.normal(of_src, (relations, heads, width)),
                "attention_dst": vector * jax.random.normal(of_dst, (relations, heads, width)),
                "bias": jnp.zeros((relations, config.hidden)),
            }
        )
    of_weight, of_bias = jax.random.split(jax.random.fold_in(key, config.layers))
    bound = config.hidden**-0.5
    head = {
        "weight": jax.random.uniform(of_weight, (config.hidden, config.classes), minval=-bound, maxval=bound),
        "bias": jax.random.uniform(of_bias, (config.classes,), minval=-bound, maxval=bound),
    }
    return {"layers": layers, "head": head}


@rgnn.program
def _layer(g: Any, x: Any, params: Any, bias: Any) -> Any:
    return library.rgat(g, x, params, softmax="relation") + g.per_node_type(bias)


def layer(config: RGATConfig, graph: rgnn.RelGraph, x: Array, params: dict[str, Array]) -> Array:
    """One layer: [sources, k] -> [destinations, hidden]. A node gets the biases of all relations into its type."""
    into = np.array([config.node_types.index(target) for _, _, target in config.edge_types], np.int32)
    bias = jnp.zeros((len(config.node_types), config.hidden)).at[into].add(params["bias"])
    own = {name: params[name].astype(x.dtype) for name in ("weight", "attention_src", "attention_dst")}
    options = rgnn.Options(backend=config.backend, precision=config.precision)
    result: Array = _layer(graph, x, own, bias.astype(x.dtype), options=options)
    return result


def logits(
    config: RGATConfig,
    params: dict[str, Any],
    blocks: Sequence[Block],
    x: Mapping[str, Array],
    positions: Array,
    key: Array | None = None,
) -> Array:
    """Logits of the seeds, float32[seeds, classes].

    Args:
        config: the sizes.
        params: from `init`.
        blocks: of `make_blocks`, one for each layer.
        x: features by node type, [nodes, in_features].
        positions: int32[seeds], the local numbers of the seeds, `sample.seed_positions["paper"]`.
        key: of dropout; None: no dropout.
    """
    h = blocks[0].join(jax.tree.map(lambda rows: rows.astype(config.dtype), x))
    words = None
    if key is not None and config.dropout:
        words = _random_words(key, [block.num_destinations for block in blocks[:-1]], -(-config.hidden // 2))
    for number, (block, own) in enumerate(zip(blocks, params["layers"], strict=True)):
        h = layer(config, block.bipartite, h, own)
        if number + 1 < len(blocks):
            h = jax.nn.leaky_relu(h, BETWEEN_SLOPE)
            h = h if words is None else _dropped(words[number], h, config.dropout)
    # Papers that are seeds are the first papers.
    seeds = blocks[-1].split(h)[SEED_TYPE][positions]
    found = jnp.dot(seeds, params["head"]["weight"].astype(h.dtype), preferred_element_type=jnp.float32)
    return found + params["head"]["bias"]


def _random_words(key: Array, rows: Sequence[int], width: int) -> list[Array]:
    """For each number of rows uint32[rows, width], by one call of XLA's generator. Threefry would outlast a layer."""
    data = jax.random.key_data(key).reshape(-1)
    fast = jax.random.wrap_key_data(jnp.concatenate([data, data])[:4], impl="rbg")
    words = jax.random.bits(fast, (sum(rows), width), jnp.uint32)
    return jnp.split(words, np.cumsum(rows)[:-1])


def _dropped(words: Array, h: Array, share: float) -> Array:
    """Inverted dropout by 16 random bits an element: `words` is uint32[rows, half of the columns]."""
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=1)[:, : h.shape[1]]
    bound = round(share * 65536)
    return jnp.where(halves >= bound, h * (65536 / (65536 - bound)), 0).astype(h.dtype)


def cross_entropy(found: Array, labels: Array, valid: Array) -> Array:
    """Mean cross-entropy of the valid seeds."""
    picked = jnp.take_along_axis(found, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(found, axis=1) - picked
    return jnp.where(valid, losses, 0).sum() / jnp.maximum(valid.sum(), 1)


# --------------------------------------------------------------------------------------------------------- the data


@dataclass(frozen=True, slots=True, eq=False)
class IGBData:
    """What a run trains on.

    Attributes:
        name: for reports.
        topology: all relations and their reverses, in host memory.
        features: a table for each node type.
        labels: int32[papers] on the device, -1 for none.
        num_classes: number of classes.
        train: int[training papers].
        valid: int[validation papers].
        seconds: how long the parts of a random graph took to make.
    """

    name: str
    topology: HeteroTopology
    features: FeatureStore
    labels: Array
    num_classes: int
    train: np.ndarray
    valid: np.ndarray
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Elements of a row of features."""
        return next(iter(self.features.types.values())).table.shape[1]


def relation_counts(shape: IGBShape) -> dict[tuple[str, str, str], int]:
    """Edges of each relation as MLPerf takes them: `cites` symmetric with self loops, and reverses of the others."""
    found = {}
    for (source, name, target), count in shape.num_edges.items():
        if name == SYMMETRIC:
            found[source, name, target] = 2 * count + shape.num_nodes[source]
        else:
            found[source, name, target] = count
            found[target, f"rev_{name}", source] = count
    return found


@dataclass(frozen=True, slots=True)
class DriveSpace:
    """Where features lie that are larger than host memory.

    Attributes:
        folder: on the drive.
        cache_bytes: host memory for rows that were read, of all types together.
    """

    folder: Path
    cache_bytes: int

    def options(
        self, name: str, visits: Mapping[str, np.ndarray], on_device: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """The options of a type's table: its share of the cache is its share of the visits that the device leaves."""
        left = {kind: counts.copy() for kind, counts in visits.items()}
        for kind, ids in on_device.items():
            left[kind][ids] = 0
        share = left[name].sum() / max(1e-9, sum(counts.sum() for counts in left.values()))
        return {"cache_bytes": (1 << 20) + int(share * self.cache_bytes), "visits": left[name]}

    def random_file(self, name: str, shape: tuple[int, int], dtype: Any, seed: int, progress: bool | None) -> Path:
        """A file of random rows; that of an earlier run, if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}-{seed}-{dtype}-{shape[0]}x{shape[1]}.bin"
        if not path.exists():
            part = path.with_suffix(".part")
            with open(part, "wb") as file:
                fill_rows(_RowsOfFile(file.fileno(), shape, np.dtype(dtype)), seed, label=name, progress=progress)
                os.fsync(file.fileno())
            part.rename(path)
        return path


@dataclass(frozen=True, slots=True)
class _RowsOfFile:
    """A file, for `fill_rows` to fill as it fills a table."""

    file: int
    shape: tuple[int, int]
    dtype: np.dtype

    def write(self, start: int, rows: np.ndarray) -> None:
        left, at = memoryview(rows.tobytes()), start * rows[0].nbytes
        while left:
            written = os.pwrite(self.file, left, at)
            left, at = left[written:], at + written


def random_data(
    scale: float,
    *,
    width: int = 1024,
    dtype: Any = "float8_e4m3fn",
    device_bytes: int = 0,
    drive: DriveSpace | None = None,
    batch: int = 1024,
    fan_outs: Sequence[int] = (15, 10, 5),
    seed: int = 0,
    progress: bool | None = None,
    mesh: Mesh | None = None,
    topology: HeteroTopology | None = None,
) -> IGBData:
    """A random graph with IGB's counts times `scale`, random features and labels: for measurements of speed.

    Args:
        scale: 1 for the full graph.
        width: elements of a row.
        dtype: of the tables.
        device_bytes: of rows that lie on each device: those that batches visit most.
        drive: where all rows lie then; None: the others lie in host memory.
        batch, fan_outs: of these batches.
        seed: of everything random.
        progress: draw bars; None draws on a terminal only.
        mesh: the devices over whose memory these rows are divided; None: one device.
        topology: of an earlier call with the same scale and seed, to draw other features only.
    """
    devices = [] if mesh is None else list(mesh.devices.flat)
    seconds: dict[str, float] = {}
    parts = _timed(seconds)
    shape = IGBShape.of(scale)
    if topology is None:
        topology = random_topology(shape.num_nodes, relation_counts(shape), seed=seed, progress=progress)
        parts("edges")
        topology = _with_starts(topology)
        parts("starts")
    papers = shape.num_nodes[SEED_TYPE]
    train = np.arange(max(1, round(papers * _TRAIN_SHARE)), dtype=np.int32)
    valid = np.arange(len(train), len(train) + max(1, round(papers * _VALID_SHARE)), dtype=np.int32)
    found = jnp.dtype(dtype)
    hot: dict[str, np.ndarray] = {}
    visits: dict[str, np.ndarray] = {}
    if device_bytes or drive is not None:
        visits = topology.expected_visits({SEED_TYPE: train}, fan_outs, batch_size=batch, devices=devices)
        parts("visits")
    if device_bytes:
        row_bytes = dict.fromkeys(visits, width * found.itemsize)
        slots = sum(shape.num_nodes.values()) * _SLOT_BYTES  # on each device
        hot = _rows_for_the_device(visits, row_bytes, (device_bytes - slots) * max(1, len(devices)) + slots)
        parts("hot rows")

    def table_of(number: int, name: str) -> HostTable | SplitTable | PeerTable | DriveTable:
        ids, seed_of_type = hot.get(name, np.zeros(0, np.int64)), seed * 64 + number
        if drive is not None:
            rows_of_type = (shape.num_nodes[name], width)
            path = drive.random_file(name, rows_of_type, found, seed_of_type, progress)
            return DriveTable.from_file(path, rows_of_type, found, **drive.options(name, visits, hot))
        # Begun first: devices fill their rows while the CPU fills the others.
        blocks = [
            random_rows_on_device(-(-len(ids) // max(1, len(devices))), width, found, seed_of_type + at, device=device)
            for at, device in enumerate(devices or [None])
        ] if len(ids) else []  # fmt: skip
        host = _random_host_table((shape.num_nodes[name] - len(ids), width), found, seed_of_type, name, progress)
        on_device = [DeviceTable.from_array(rows, found) for rows in blocks]
        if devices and len(ids):
            return PeerTable.from_parts(host, on_device, ids)
        return SplitTable.from_parts(host, on_device[0], ids) if len(ids) else host

    with ThreadPoolExecutor(len(shape.num_nodes)) as pool:
        tables = pool.map(table_of, itertools.count(), shape.num_nodes)
        store = FeatureStore()
        for name, table in zip(shape.num_nodes, tables, strict=True):
            store = store.with_table(name, table)
    if drive is not None:
        store = store.cached(hot)
    labels = jax.random.randint(jax.random.key(seed), (papers,), 0, NUM_CLASSES, jnp.int32)
    parts("features")
    return IGBData(f"random graph, {scale:g} of IGB", topology, store, labels, NUM_CLASSES, train, valid, seconds)


def _timed(seconds: dict[str, float]) -> Callable[[str], None]:
    """A function that writes down, and logs, the time since its last call under a name."""
    last = [time.perf_counter()]

    def passed(name: str) -> None:
        now = time.perf_counter()
        seconds[name], last[0] = round(now - last[0], 2), now
        _LOG.info("%s: %.1f s", name, seconds[name])

    return passed


def _random_host_table(shape: tuple[int, int], dtype: Any, seed: int, label: str, progress: bool | None) -> HostTable:
    """A table of random rows in memory that all cores fill, and that is pinned then: pinning alone uses one core."""
    room = np.empty(shape[0] * shape[1] * dtype.itemsize + _PAGE, np.uint8)
    begin = -room.ctypes.data % _PAGE
    rows = room[begin : begin + len(room) - _PAGE].view(dtype).reshape(shape)
    fill_rows(rows, seed, label=label, progress=progress)
    return HostTable.from_numpy(rows, copy=not rows.size)


def folder_data(
    folder: str | os.PathLike[str],
    *,
    size: str | None = None,
    num_classes: int = NUM_CLASSES,
    dtype: Any = "float8_e4m3fn",
    device_bytes: int = 0,
    drive: DriveSpace | None = None,
    batch: int = 1024,
    fan_outs: Sequence[int] = (15, 10, 5),
    cache: str | os.PathLike[str] | None = None,
    check: bool = True,
) -> IGBData:
    """IGB's heterogeneous graph from its folder, with the relations as MLPerf takes them.

    Args:
        folder, size, num_classes, check: as in `dejax.datasets.load_igb`.
        dtype: of the tables; float8 and int8 rows get a scale each.
        device_bytes, drive, batch, fan_outs: as in `random_data`; the first run writes the tables of a drive.
        cache: a folder for the sorted lists; a later run opens them instead of sorting again.
    """
    data = load_igb(folder, size=size, num_classes=num_classes, check=check)
    data.check_used("training on IGB", ("edges", "features", "labels", "num_classes", "splits"))
    prepared = data.with_reverse(symmetric=[SYMMETRIC])
    if cache is not None and os.path.exists(os.path.join(cache, "topology.json")):
        topology = HeteroTopology.load(cache)
    else:
        topology = HeteroTopology.from_edges(
            prepared.edges, prepared.num_nodes, keep_edge_ids=False, on_host=True, folder=cache
        )
    topology = _with_starts(topology)
    found = jnp.dtype(dtype)
    train = data.splits["train"][SEED_TYPE].astype(np.int32)
    hot: dict[str, np.ndarray] = {}
    visits: dict[str, np.ndarray] = {}
    if device_bytes or drive is not None:
        every = topology.expected_visits({SEED_TYPE: train}, fan_outs, batch_size=batch)
        visits = {name: every[name] for name in data.features}
    if device_bytes:
        row_bytes = {name: rows.shape[1] * found.itemsize for name, rows in data.features.items()}
        hot = _rows_for_the_device(visits, row_bytes, device_bytes)
    scale = "row" if found.itemsize == 1 else None
    if drive is None:
        on_device: Any = hot or False
        store = FeatureStore.from_arrays(data.features, dtype=found, scale=scale, on_device=on_device)
    else:
        store = FeatureStore()
        for name, rows in data.features.items():
            own = drive.folder / f"{name}-{found}"
            if not (own / "table.json").exists():
                write_drive_table(own, rows, dtype=found, scale=scale)
            store |= FeatureStore({name: NodeFeatures.from_drive(own, **drive.options(name, visits, hot))})
        store = store.cached(hot)
    store.check_counts(topology.num_nodes)
    valid = data.splits["valid"][SEED_TYPE].astype(np.int32)
    labels = jnp.asarray(data.labels[SEED_TYPE])
    return IGBData(data.name, topology, store, labels, num_classes, train, valid)


def _with_starts(topology: HeteroTopology) -> HeteroTopology:
    """The topology with the first edge of each receiver on the device, if these numbers take little of its memory."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    fits = memory is None or topology.starts_nbytes <= _STARTS_SHARE * memory
    return topology.with_starts_on_device() if fits else topology


def _rows_for_the_device(
    visits: dict[str, np.ndarray], row_bytes: dict[str, int], device_bytes: int
) -> dict[str, np.ndarray]:
    """The rows that batches read most, then further ones while there is room: those need no host memory then."""
    return hot_rows({name: counts + 1 for name, counts in visits.items()}, row_bytes, device_bytes)


# -------------------------------------------------------------------------------------------------------- the steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run does; two runs of one recipe and data give the same losses.

    Attributes:
        batch: seeds of a step on each device.
        fan_outs: of each hop and relation.
        rate: learning rate of Adam.
        pipeline: steps of one program; 0 for single steps.
        seed: of parameters, order and samples.
        sigmas: standard deviations that arrays of samples have above the mean.
        offload: whether residuals of the layers lie in host memory between forward and backward.
    """

    batch: int = 1024
    fan_outs: tuple[int, ...] = (15, 10, 5)
    rate: float = 1e-3
    pipeline: int = 32
    seed: int = 0
    sigmas: float = 5.0
    offload: bool = False


class RGATTrainer:
    """The jitted functions of a run.

    Args:
        data: the graph.
        config: the model.
        recipe: the run.
        mesh: the devices; None: one device without a mesh.
        capacities: the bounds of samples, if they are known; else they are found on some batches.

    Attributes:
        inputs: topology, features and labels where steps read them: on all devices of the mesh.
        capacities: the bounds of samples.
        steps: the training function of one step, or of `recipe.pipeline`.
        one: the training function of one step.
    """

    def __init__(
        self,
        data: IGBData,
        config: RGATConfig,
        recipe: Recipe,
        mesh: Mesh | None = None,
        capacities: Capacities | None = None,
    ) -> None:
        self.data, self.config, self.recipe, self.mesh = data, config, recipe, mesh
        self.devices = 1 if mesh is None else mesh.size
        self._epochs: dict[int, np.ndarray] = {}  # the batches of the present epoch
        self.optimizer = optax.adam(recipe.rate)
        rng = np.random.default_rng([recipe.seed, 11])
        batches = [(SEED_TYPE, rng.choice(data.train, recipe.batch).astype(np.int32)) for _ in range(20)]
        self.capacities = capacities or find_capacities(
            jax.random.key(recipe.seed),
            data.topology,
            batches,
            list(recipe.fan_outs),
            sigmas=recipe.sigmas,
            print_table=None,
        )
        self.inputs: tuple[Any, Any, Any] = data.topology, data.features, data.labels
        if mesh is not None:
            self.inputs = distributed.share(self.inputs, mesh)
            topology, features, labels = distributed.local(self.inputs)  # not a second copy on the first device
            self.data = replace(data, topology=topology, features=features, labels=labels)
        options: dict[str, Any] = {"dtype": config.dtype, "joined": True, "mesh": mesh}
        self.one = sampled_step(self.update, self.sample, **options)
        pipelined = pipelined_steps(self.update, self.sample, **options)
        self.steps = pipelined if recipe.pipeline else self.one
        self._correct = jax.jit(self._num_correct)

    def init(self) -> dict[str, Any]:
        """The state before the first step."""
        params = jax.jit(lambda key: init(key, self.config))(jax.random.key(self.recipe.seed))
        return {"params": params, "moments": self.optimizer.init(params)}

    def sample(self, key: Array, topology: HeteroTopology, seeds: Array) -> SampledBlocks:
        fan_outs = list(self.recipe.fan_outs)
        return sample_blocks(key, topology, (SEED_TYPE, seeds), fan_outs, capacities=self.capacities)

    def logits(self, params: Any, batch: MiniBatch, key: Array | None) -> Array:
        blocks = batch.blocks

        def of(params: Any, x: Any) -> Array:
            positions = batch.sample.seed_positions[SEED_TYPE]
            return logits(self.config, params, blocks, x, positions, key)

        return (offload(of) if self.recipe.offload else of)(params, batch.x)

    def update(self, state: dict[str, Any], batch: MiniBatch, labels: Array) -> tuple[dict[str, Any], dict[str, Array]]:
        """A step: loss, gradient, Adam."""
        own = labels[jnp.maximum(batch.seeds, 0)]
        valid = (batch.seeds >= 0) & (own >= 0)

        def loss_of(params: Any) -> Array:
            return cross_entropy(self.logits(params, batch, batch.key), own, valid)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        lost = batch.sample.lost.sum()
        if self.mesh is not None:  # the mean over the seeds of all devices
            count = valid.sum(dtype=jnp.float32)
            share = count / jnp.maximum(jax.lax.psum(count, "data"), 1)
            loss, gradients = jax.lax.psum(jax.tree.map(lambda x: x * share, (loss, gradients)), "data")
            lost = jax.lax.psum(lost, "data")
        changes, moments = self.optimizer.update(gradients, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], changes)
        return {"params": params, "moments": moments}, {"loss": loss, "lost": lost}

    def seeds(self, first: int, count: int) -> np.ndarray:
        """The seeds of some steps: int32[count, batch of all devices]. Each epoch has an order of its own."""
        found, parts, size = 0, [], self.recipe.batch * self.devices
        per_epoch = -(-len(self.data.train) // size)
        while found < count:
            epoch, at = divmod(first + found, per_epoch)
            if epoch not in self._epochs:
                self._epochs = {epoch: seed_batches(self.data.train, size, seed=self.recipe.seed, epoch=epoch)}
            batches = self._epochs[epoch]
            parts.append(batches[at : at + count - found])
            found += len(parts[-1])
        return np.concatenate(parts)

    def run(self, state: dict[str, Any], first: int, count: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """`count` steps from step `first` on; results are not waited for."""
        key, (topology, features, labels) = jax.random.key(self.recipe.seed + 1), self.inputs
        keys, seeds = step_keys(key, first, count), jnp.asarray(self.seeds(first, count))
        if self.recipe.pipeline and count == self.recipe.pipeline:
            return self.steps(state, topology, features, keys, seeds, labels)
        outs = []
        for n in range(count):
            state, out = self.one(state, topology, features, keys[n], seeds[n], labels)
            outs.append(out)
        return state, jax.tree.map(lambda *some: jnp.stack(some), *outs)

    def accuracy(self, params: Any, batches: int) -> float:
        """The share of correct validation papers in some sampled batches."""
        topology, features, labels = self.data.topology, self.data.features, self.data.labels
        params = params if self.mesh is None else distributed.local(params)
        seeds = seed_batches(self.data.valid, self.recipe.batch, seed=self.recipe.seed)[:batches]
        found = [self._correct(params, topology, features, jax.random.key(n), jnp.asarray(some), labels)
                 for n, some in enumerate(seeds)]  # fmt: skip
        right, valid = (sum(int(x[side]) for x in found) for side in (0, 1))
        return right / max(1, valid)

    def _num_correct(
        self, params: Any, topology: Any, features: Any, key: Array, seeds: Array, labels: Array
    ) -> tuple[Array, Array]:
        sample = self.sample(key, topology, seeds)
        ids = {name: ids for name, ids in sample.node_ids.items() if name in features and ids.shape[0]}
        batch = MiniBatch(sample, features.gather(ids, dtype=self.config.dtype), seeds, key)
        own = labels[jnp.maximum(seeds, 0)]
        valid = (seeds >= 0) & (own >= 0)
        right = self.logits(params, batch, None).argmax(1) == own
        return (right & valid).sum(), valid.sum()


# ---------------------------------------------------------------------------------------------------------- a run


def train(trainer: RGATTrainer, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs all steps, prints progress and writes checkpoints.

    Returns:
        The state, and the curves: the loss of each step, (step, validation accuracy) at reports, seconds of the steps
        that were measured, and their number.

    Raises:
        ValueError, FileNotFoundError: the run to resume had other settings, or is not there.
    """
    checkpoints = Checkpoints(options.out)
    settings = {"data": trainer.data.name, "model": asdict(trainer.config), **asdict(trainer.recipe)}
    if trainer.mesh is not None:
        settings["devices"] = trainer.devices
    # How steps are called and where residuals lie change no number.
    checkpoints.begin({**settings, "pipeline": None, "offload": None}, resume=options.resume)
    state, done, seed = trainer.init(), 0, trainer.recipe.seed
    curves: dict[str, Any] = {"loss": [], "accuracy": [], "seconds": 0.0, "measured": 0}
    if options.resume and checkpoints.latest(seed) is not None:
        state, curves = checkpoints.restore(seed, state)
        done = len(curves["loss"])
    per_call = trainer.recipe.pipeline or 1
    reported, saved, warm = done, done, False
    while done < options.steps:
        count = min(per_call, options.steps - done)
        began = time.perf_counter()
        state, outs = trainer.run(state, done, count)
        losses = np.asarray(outs["loss"])
        seconds = time.perf_counter() - began
        done += count
        curves["loss"] += [float(value) for value in losses]
        if lost := int(np.asarray(outs["lost"]).sum()):
            print(f"step {done}: {lost} nodes did not fit in the samples' arrays; give a larger --sigmas", flush=True)
        if warm and count == per_call:  # the first call compiles
            curves["seconds"] += seconds
            curves["measured"] += count
        warm = True
        if done - reported >= options.report or done >= options.steps:
            reported = done
            of_all = trainer.recipe.batch * trainer.devices * count / seconds
            rate = f"{1e3 * seconds / count:.1f} ms a step, {of_all:,.0f} seeds/s"
            line = f"step {done}/{options.steps}, loss {losses.mean():.4f}, {rate}"
            if options.eval_batches:
                curves["accuracy"].append([done, trainer.accuracy(state["params"], options.eval_batches)])
                line += f", validation {100 * curves['accuracy'][-1][1]:.1f} %"
            print(line, flush=True)
        if options.checkpoint and done - saved >= options.checkpoint and done < options.steps:
            saved = done
            checkpoints.save(seed, done, state, curves)
    if checkpoints.latest(seed) != done:
        checkpoints.save(seed, done, state, curves)
    return state, curves


def results(trainer: RGATTrainer, curves: dict[str, Any], total_seconds: float) -> dict[str, Any]:
    """The results of a run, for JSON."""
    data, step = trainer.data, curves["seconds"] / curves["measured"] if curves["measured"] else None
    return {
        "data": data.name,
        "nodes": data.topology.num_nodes,
        "edges": {"/".join(edge_type): count for edge_type, count in data.topology.num_edges.items()},
        "model": asdict(trainer.config),
        "recipe": asdict(trainer.recipe),
        "loss": curves["loss"],
        "accuracy": curves["accuracy"],
        "step_ms": None if step is None else 1e3 * step,
        "devices": trainer.devices,
        "seeds_per_second": None if step is None else trainer.recipe.batch * trainer.devices / step,
        "total_s": total_seconds,
    }


def table(found: dict[str, Any], out: Path) -> str:
    """The table at the end of a run, of its `results`."""
    model, recipe, loss, step = found["model"], found["recipe"], found["loss"], found["step_ms"]
    nodes, edges = sum(found["nodes"].values()), sum(found["edges"].values())
    rows = {
        "graph": f"{found['data']}: {nodes:,} nodes, {edges:,} edges, {len(found['edges'])} relations",
        "model": f"R-GAT, {model['layers']} layers, {model['heads']} heads, {model['hidden']} wide",
        "steps": f"{len(loss):,} of {found['devices']} x {recipe['batch']:,} seeds, "
        f"fan-out {', '.join(map(str, recipe['fan_outs']))}",
        "loss": f"{loss[0]:.4f} to {np.mean(loss[-10:]):.4f}" if loss else "-",
        "validation": f"{100 * found['accuracy'][-1][1]:.2f} %" if found["accuracy"] else "not measured",
        "time per step": f"{step:.2f} ms, {found['seeds_per_second']:,.0f} seeds/s" if step else "not measured",
        "whole job": f"{found['total_s']:.1f} s",
        "files": f"{out}/results.json, curves.png, checkpoints",
    }
    return "\n".join(f"  {name:<15}{value}" for name, value in rows.items())


def plot(found: dict[str, Any], path: Path) -> None:
    """Draws the loss by step, and validation accuracy where it was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(found["loss"]) + 1), found["loss"], color="#0072B2", linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy of the seeds")
    if found["accuracy"]:
        right = axes.twinx()
        right.plot(*zip(*((n, 100 * a) for n, a in found["accuracy"]), strict=True), color="#D55E00", marker="o")
        right.set_ylabel("validation accuracy, %", color="#D55E00")
    figure.savefig(path)


# ------------------------------------------------------------------------------------------------------ the command


def _fan_outs(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train MLPerf's R-GAT on IGB's heterogeneous graph, in mini-batches.")
    group = parser.add_argument_group("data")
    group.add_argument("--data", type=Path, help="IGB's folder, which has processed/; by default a random graph")
    group.add_argument("--size", help="sub-folder of --data: tiny, small, medium, large or full")
    group.add_argument("--cache", type=Path, help="a folder for the sorted lists of --data")
    group.add_argument("--classes", type=int, choices=(19, NUM_CLASSES), default=NUM_CLASSES, help="labels of --data")
    group.add_argument("--scale", type=float, default=1e-5, help="of the random graph: 1 has 5.5e8 nodes")
    group.add_argument("--width", type=int, default=1024, help="elements of a random row")
    group.add_argument(
        "--dtype",
        choices=("float8_e4m3fn", "int8", "bfloat16", "float32"),
        default="float8_e4m3fn",
        help="of the features' tables",
    )
    group.add_argument("--device-gb", type=float, default=0.0, help="of features on each device: the most visited rows")
    group.add_argument("--drive", type=Path, help="a folder on a fast drive for the features; by default host memory")
    group.add_argument("--cache-gb", type=float, default=4.0, help="of host memory for rows of --drive")
    group = parser.add_argument_group("model")
    group.add_argument("--hidden", type=int, default=512, help="width of the layers")
    group.add_argument("--heads", type=int, default=4, help="heads of attention")
    group.add_argument("--dropout", type=float, default=0.2, help="share of features dropped")
    group.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the arithmetic")
    group = parser.add_argument_group("training")
    group.add_argument("--batch", type=int, default=128, help="seeds of a step; MLPerf takes 1,024 a GPU")
    group.add_argument("--fan-outs", type=_fan_outs, default=(15, 10, 5), help="for each relation, by hop")
    group.add_argument("--steps", type=int, default=20, help="training steps")
    group.add_argument("--rate", type=float, default=1e-3, help="learning rate of Adam")
    group.add_argument("--pipeline", type=int, default=0, help="steps of one program whose parts overlap; 0: single")
    group.add_argument("--sigmas", type=float, default=5.0, help="room of samples above the mean size")
    group.add_argument("--offload", action="store_true", help="keep the layers' residuals in host memory")
    group.add_argument("--gpus", type=int, default=0, help="devices of one host that train together; 0: one, no mesh")
    group.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    group = parser.add_argument_group("run")
    group.add_argument("--report", type=int, default=10, help="steps between two lines")
    group.add_argument("--eval-batches", type=int, default=1, help="validation batches at each line; 0: none")
    group.add_argument("--out", type=Path, default=Path("out/igb-rgat"), help="results, plot, checkpoint")
    group.add_argument("--checkpoint", type=int, default=0, help="steps between checkpoints; 0: at the end")
    group.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser


def make_data(options: argparse.Namespace, mesh: Mesh | None = None) -> IGBData:
    """The graph that the options name."""
    shared: dict[str, Any] = {
        "dtype": options.dtype,
        "device_bytes": int(options.device_gb * 1e9),
        "drive": None if options.drive is None else DriveSpace(options.drive, int(options.cache_gb * 1e9)),
        "batch": options.batch,
        "fan_outs": options.fan_outs,
    }
    if mesh is not None and options.drive is not None and options.device_gb:
        raise ValueError(
            "`--device-gb` must be 0 with `--drive` and `--gpus`: the GPUs of a mesh divide no rows of a drive"
        )
    if options.data is None:
        return random_data(options.scale, width=options.width, seed=options.seed, mesh=mesh, **shared)
    if mesh is not None and options.device_gb:
        raise ValueError("`--device-gb` must be 0 with `--data` and `--gpus`: use `PeerTable` on rows of your own")
    return folder_data(options.data, size=options.size, num_classes=options.classes, cache=options.cache, **shared)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        mesh = distributed.make_mesh(options.gpus) if options.gpus else None
        data = make_data(options, mesh)
        print(f"{data.name}: {time.perf_counter() - began:.1f} s to prepare\n{data.features}", flush=True)
        config = RGATConfig(
            edge_types=data.topology.edge_types,
            node_types=data.topology.node_types,
            in_features=data.width,
            hidden=options.hidden,
            heads=options.heads,
            layers=len(options.fan_outs),
            classes=data.num_classes,
            dropout=options.dropout,
            dtype=options.compute,
        )
        recipe = Recipe(**{name: getattr(options, name) for name in Recipe.__dataclass_fields__})
        trainer = RGATTrainer(data, config, recipe, mesh)
        _, curves = train(trainer, options)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    found = results(trainer, curves, time.perf_counter() - began)
    print(table(found, options.out))
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(found, options.out / "curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
