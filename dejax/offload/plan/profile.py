"""Measurements for the planners: short stacks of layers, the bus, the drive, and the waits for them."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.offload.activations import calls, current
from dejax.offload.activations.boundary import ring_bytes
from dejax.offload.activations.residuals import Residual, make_plan
from dejax.offload.activations.store import ActivationStore
from dejax.offload.state.store import StateStore, store_at

SHORT = (2, 4)  # layers of the profiled stacks
_PROFILE_SECONDS = 0.3  # for each time taken
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_KEPT_FREE = 1 / 8  # of host memory, which a store with a disk tier leaves free
_drives: dict[tuple[Any, ...], tuple[float, float]] = {}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves during one phase of a step.

    Attributes:
        in_bytes, out_bytes: over the bus, to the device and from it.
        drive_seconds: that a drive takes for its part.
    """

    in_bytes: float = 0.0
    out_bytes: float = 0.0
    drive_seconds: float = 0.0


NOTHING = Traffic()


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where offloaded tensors can go, and how fast.

    Attributes:
        out_bandwidth, in_bandwidth: bytes a second, device to pinned host memory and back.
        host_bytes: size of host memory.
        disk_bytes: size of the disk tier; 0: there is none.
        write_bandwidth, read_bandwidth: bytes a second of the disk tier.
        out_duplex, in_duplex: bytes a second of each direction of the bus while both are busy. None: as alone.
    """

    out_bandwidth: float
    in_bandwidth: float
    host_bytes: float = float("inf")
    disk_bytes: float = 0.0
    write_bandwidth: float = float("inf")
    read_bandwidth: float = float("inf")
    out_duplex: float | None = None
    in_duplex: float | None = None

    def bus_seconds(self, moved: Traffic) -> float:
        """The time of copies that run in both directions at once: first both, then the rest of one of them."""
        alone = max(moved.in_bytes / self.in_bandwidth, moved.out_bytes / self.out_bandwidth)
        into = self.in_bandwidth if self.in_duplex is None else min(self.in_duplex, self.in_bandwidth)
        out = self.out_bandwidth if self.out_duplex is None else min(self.out_duplex, self.out_bandwidth)
        both = min(moved.in_bytes / into, moved.out_bytes / out)
        if both <= 0:
            return alone
        rest_in, rest_out = moved.in_bytes - both * into, moved.out_bytes - both * out
        return both + max(0.0, rest_in / self.in_bandwidth, rest_out / self.out_bandwidth)

    def with_duplex(self, each: float) -> Tiers:
        """These tiers, where each direction of the bus has so many bytes a second while both are busy.

        A direction alone is not slower. Where it was measured so, something else was using the bus.
        """
        alone = {"in_bandwidth": max(each, self.in_bandwidth), "out_bandwidth": max(each, self.out_bandwidth)}
        return dataclasses.replace(self, out_duplex=each, in_duplex=each, **alone)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step's stored bytes lie.

    Attributes:
        ring_bytes, host_bytes, disk_bytes: in each tier when forward ends.
        stall_seconds: time that the step waits for copies.
    """

    ring_bytes: float
    host_bytes: float
    disk_bytes: float
    stall_seconds: float


def place(
    stored: float,
    ring: float,
    forward: float,
    backward: float,
    tiers: Tiers,
    with_forward: Traffic = NOTHING,
    with_backward: Traffic = NOTHING,
) -> Placement | None:
    """Predicts where stored bytes lie, and how long a step waits for them.

    All bytes but the ring's leave the device while forward runs; where the bus is slower, the compute stream waits.
    Backward likewise. Bytes that host memory does not hold are written to disk meanwhile. They must be there before the
    last tensor needs their memory, so the time of the tensors that stay in the ring does not count.

    Args:
        stored: bytes of a step.
        ring: bytes of the ring.
        forward: seconds of the layers that store.
        backward: seconds of the layers that fetch.
        tiers: the tiers below the ring.
        with_forward, with_backward: what else goes over the bus meanwhile; waits for it are counted, too.

    Returns:
        None where the tiers are too small.
    """
    travels = max(0.0, stored - ring)
    on_disk = 0.0
    if tiers.disk_bytes > 0:
        on_disk = max(0.0, travels - tiers.host_bytes * (1 - _KEPT_FREE))
    if on_disk > tiers.disk_bytes or travels - on_disk > tiers.host_bytes:
        return None
    share = travels / stored if stored > 0 else 0.0
    out = tiers.bus_seconds(Traffic(with_forward.in_bytes, with_forward.out_bytes + travels))
    back = tiers.bus_seconds(Traffic(with_backward.in_bytes + travels, with_backward.out_bytes))
    written, read = on_disk / tiers.write_bandwidth, on_disk / tiers.read_bandwidth
    waiting = max(0.0, out - forward, with_forward.drive_seconds - forward, written - share * forward)
    waiting += max(0.0, back - backward, with_backward.drive_seconds - backward, read - share * backward)
    return Placement(min(ring, stored), travels - on_disk, on_disk, waiting)


def tiers_of(store: ActivationStore | None) -> Tiers:
    """Measures the bus, one direction at a time, and the drive of a store for activations."""
    gpu = jax.default_backend() == "gpu"
    tiers = Tiers(*bandwidths()) if gpu else Tiers(float("inf"), float("inf"))
    if store is None:
        return tiers
    tiers = dataclasses.replace(tiers, host_bytes=store.host_bytes)
    if not store.paths:
        return tiers
    write, read = drive_bandwidths(store)
    disk = float("inf") if store.disk_bytes is None else store.disk_bytes
    return dataclasses.replace(tiers, disk_bytes=disk, write_bandwidth=write, read_bandwidth=read)


def drive_bandwidths(store: ActivationStore, nbytes: int = 1 << 30) -> tuple[float, float]:
    """Bytes a second (written, read) of a store with the same paths and engine; measured once in each process."""
    key = (store.paths, store.engine, nbytes)
    if key in _drives:
        return _drives[key]
    tensor, sites = nbytes // 16, [(1 << 40) + k for k in range(16)]
    x = jax.random.bits(jax.random.key(0), (tensor // 4,), jnp.uint32)

    @jax.jit
    def put(x: Any) -> list[Any]:
        here = current.current_binding()  # the probe's: tracing happens inside its `with`
        return [calls.store(x, store_id=here, site=site, ring_bytes=2 * tensor) for site in sites]

    @jax.jit
    def fetch(handles: list[Any]) -> Any:
        here, total = current.current_binding(), jnp.zeros((), jnp.uint32)
        for site, handle in zip(reversed(sites), reversed(handles), strict=True):
            total += calls.fetch(handle, x, (total,), store_id=here, site=site)[0]
        return total

    with ActivationStore(store.paths, host_bytes=3 * tensor, engine=store.engine) as probe:
        for _ in range(2):  # the first round creates the files and the memory
            before, begin = probe.stats(), time.perf_counter()
            handles = jax.block_until_ready(put(x))
            probe.drain()
            written, middle = probe.stats(), time.perf_counter()
            write = (written.written_bytes - before.written_bytes) / (middle - begin)
            jax.block_until_ready(fetch(handles))
            read = (probe.stats().read_bytes - before.read_bytes) / (time.perf_counter() - middle)
    _drives[key] = (max(write, 1.0), max(read, 1.0))
    return _drives[key]


def state_bandwidths(path: Any, nbytes: int = 1 << 29) -> tuple[float, float]:
    """Bytes a second (written, read) of a store of state, or of one at this path; measured once in each process."""
    paths = path.paths if isinstance(path, StateStore) else path
    key = ("state", str(paths), nbytes)
    if key not in _drives:
        x, unit = np.random.default_rng(0).integers(0, 1 << 30, nbytes // 4, np.int32), nbytes // 16
        store = store_at(path)
        try:
            array = store.put(x, unit)  # makes the files
            store.remove(array)
            begin = time.perf_counter()
            array = store.put(x, unit)
            middle = time.perf_counter()
            np.asarray(array)
            end = time.perf_counter()
            store.remove(array)
        finally:
            if store is not path:
                store.close()
        _drives[key] = nbytes / max(1e-9, middle - begin), nbytes / max(1e-9, end - middle)
    return _drives[key]


def count_layers(params: Any, caller: str) -> int:
    """The number of layers of a stack.

    Raises:
        ValueError: there are too few to profile.
    """
    num_layers: int = jax.tree.leaves(params)[0].shape[0]
    if num_layers < max(SHORT):
        raise ValueError(
            f"{caller}: `params` must have at least {max(SHORT)} layers to be profiled, got {num_layers}; use "
            "jax.checkpoint or offload without a plan"
        )
    return num_layers


def measured_rows(predicted: tuple[float, float], measured: tuple[float, float] | None) -> list[str]:
    """The last rows of a plan's table, from (peak bytes, seconds): the measured values, and how far they are off."""
    if measured is None:
        return []
    off = [f"{100 * (a / b - 1):+.1f} %" for a, b in zip(predicted, measured, strict=True)]
    return [
        f"| measured | {measured[0] / 2**30:.3f} | {measured[1] * 1e3:.2f} | | |",
        f"| off by | {off[0]} | {off[1]} | | |",
    ]


def scan_layers(body: Callable[[Any, Any], Any], params: Any, x: Any) -> Any:
    """`body` over the leading axis of `params`."""
    return jax.lax.scan(lambda x, p: (body(p, x), None), x, params)[0]


def part(params: Any, begin: int, count: int) -> Any:
    """The parameters of `count` layers from `begin` on."""
    return jax.tree.map(lambda leaf: leaf[begin : begin + count], params)


def short_stacks(
    body: Callable[[Any, Any], Any], params: Any, x: Any, *, run: bool = True
) -> tuple[float, float, float, float]:
    """(base bytes, bytes a layer, base seconds, seconds a layer) of a training step, from two short stacks."""
    temps, seconds = [], []
    for count in SHORT:
        step = training_step(functools.partial(scan_layers, body))
        if run:
            temp, took = profile(step, part(params, 0, count), x)
        else:
            compiled = step.lower(part(params, 0, count), x).compile()
            temp, took = float(compiled.memory_analysis().temp_size_in_bytes), 0.0
        temps.append(temp)
        seconds.append(took)
    layer_bytes = (temps[1] - temps[0]) / (SHORT[1] - SHORT[0])
    return temps[0] - SHORT[0] * layer_bytes, layer_bytes, *base_and_layer(seconds)


def base_and_layer(seconds: Sequence[float]) -> tuple[float, float]:
    """Times of a step without layers, and of one layer, from those of the two short stacks."""
    # Other work on the machine can make the shorter stack take longer.
    layer = max(0.0, (seconds[1] - seconds[0]) / (SHORT[1] - SHORT[0]))
    return max(0.0, seconds[0] - SHORT[0] * layer), layer


def training_step(stack: Callable[[Any, Any], Any]) -> Any:
    """`value_and_grad` of a stack, jitted."""

    def loss(params: Any, x: Any) -> Any:
        return sum((leaf.astype(jnp.float32) ** 2).mean() for leaf in jax.tree.leaves(stack(params, x)))

    return jax.jit(jax.value_and_grad(loss))


def timed(run: Callable[[], Any], *, seconds: float | None = None) -> float:
    """Median seconds of a run, after three warm-up runs."""
    return launched(run, seconds=seconds)[0]


def launched(run: Callable[[], Any], *, seconds: float | None = None) -> tuple[float, float]:
    """Median seconds of a run, after three warm-up runs, and least until `run` returns, which may be before it ends."""
    for _ in range(3):
        jax.block_until_ready(run())
    times: list[float] = []
    returned: list[float] = []
    end = time.perf_counter() + (_PROFILE_SECONDS if seconds is None else seconds)
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        result = run()
        returned.append(time.perf_counter() - begin)
        jax.block_until_ready(result)
        times.append(time.perf_counter() - begin)
    return statistics.median(times), min(returned)


def fastest(runs: Sequence[Callable[[], Any]], *, seconds: float) -> list[float]:
    """Least seconds of each run, after three warm-up rounds.

    The runs take turns, for at least `seconds` and five rounds. Other work on the machine, which may last for a tenth
    of a second, then does not slow one of them alone, and rates from differences of their times stay right.
    """
    for _ in range(3):
        for run in runs:
            jax.block_until_ready(run())
    least = [float("inf")] * len(runs)
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 5 or time.perf_counter() < end:
        for i, run in enumerate(runs):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            least[i] = min(least[i], time.perf_counter() - begin)
        rounds += 1
    return least


def profile(step: Any, params: Any, x: Any) -> tuple[float, float]:
    """Compiles and times a step: (bytes of temporaries, seconds)."""
    compiled = step.lower(params, x).compile()
    temp = float(compiled.memory_analysis().temp_size_in_bytes)
    return temp, timed(lambda: compiled(params, x))


def forward_seconds(body: Callable[[Any, Any], Any], params: Any, x: Any) -> float:
    """Seconds of a layer's forward pass."""
    took = []
    for count in SHORT:
        stack = jax.jit(functools.partial(scan_layers, body))
        took.append(timed(functools.partial(stack, part(params, 0, count), x)))
    return base_and_layer(took)[1]


def residuals_of(fn: Callable[[Any, Any], Any], params: Any, x: Any, min_bytes: int) -> tuple[list[Residual], float]:
    """The tensors that one layer would store, and the FLOP of its forward pass."""
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    leaves, treedef = jax.tree.flatten((layer, x))

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(fn(*jax.tree.unflatten(treedef, leaves)))

    def wanted(residual: Residual) -> bool:
        return residual.nbytes >= max(1, min_bytes)

    is_activation = [False] * len(jax.tree.leaves(layer)) + [True] * len(jax.tree.leaves(x))
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    plan = make_plan(flat, shapes, is_activation, wanted)
    return [source.info for source in plan.sources if source.stored], plan.flops


def ring_of(store: ActivationStore | None, sizes: Sequence[int], flops: float) -> int:
    """Bytes of the device's ring for a layer that stores tensors of these sizes; 0 on the CPU."""
    if jax.default_backend() != "gpu" or not sizes:
        return 0
    return store.device_bytes if store is not None and store.device_bytes is not None else ring_bytes(sizes, flops)


@functools.cache
def device_bandwidth(nbytes: int = 1 << 28) -> float:
    """Bytes a second that a copy on the device reads and writes; measured once in each process.

    The difference of two sizes leaves out the launch.
    """
    copy = jax.jit(lambda x: x + 1)
    sizes = (nbytes // 4, nbytes)
    short, long = fastest([functools.partial(copy, jnp.zeros(size // 4, jnp.float32)) for size in sizes], seconds=0.05)
    return 2 * (sizes[1] - sizes[0]) / max(1e-9, long - short)


def bandwidths(nbytes: int = 1 << 28, count: int = 4) -> tuple[float, float]:
    """Bytes a second, device to pinned host memory and back.

    The time of one copy is subtracted from that of several: it includes the allocation.
    """
    near = [jax.device_put(np.full(nbytes // 4, i, np.float32), jax.devices()[0]) for i in range(count)]
    far = jax.block_until_ready(jax.device_put(near, _HOST))

    def copy(arrays: list[Any], to: Any) -> Callable[[], Any]:
        return lambda: jax.device_put(arrays, to)

    ways = [copy(arrays[:n], to) for arrays, to in ((near, _HOST), (far, _DEVICE)) for n in (1, count)]
    out_one, out_all, in_one, in_all = fastest(ways, seconds=0.2)
    moved = (count - 1) * nbytes
    return moved / max(1e-9, out_all - out_one), moved / max(1e-9, in_all - in_one)
