"""Measurements for plans: short stacks of layers, the bus, the device's memory and drives."""

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

from dejax._platform import default_device, on_gpu
from dejax.offload.activations import calls, current
from dejax.offload.activations.boundary import ring_bytes
from dejax.offload.activations.residuals import Residual, make_derivative
from dejax.offload.activations.store import ActivationStore
from dejax.offload.state.store import StateStore, store_at
from dejax.offload.state.stream.rows import HostRows, Walk

SHORT = (2, 4)  # layers of the profiled stacks
_PROFILE_SECONDS = 0.3  # how long each time is measured
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_drives: dict[tuple[Any, ...], tuple[float, float]] = {}


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memories to which arrays can be moved, and the rates of moving them.

    Attributes:
        out_bandwidth, in_bandwidth: bytes a second, device to pinned host memory and back.
        host_bytes: size of host memory.
        disk_bytes: size of the disk tier; 0: there is none.
        write_bandwidth, read_bandwidth: bytes a second of the disk tier.
        duplex_bandwidth: bytes a second of each direction of the bus while both are busy, if that is slower than alone.
    """

    out_bandwidth: float
    in_bandwidth: float
    host_bytes: float = float("inf")
    disk_bytes: float = 0.0
    write_bandwidth: float = float("inf")
    read_bandwidth: float = float("inf")
    duplex_bandwidth: float = float("inf")

    def bus_seconds(self, in_bytes: float, out_bytes: float) -> float:
        """The time of copies in both directions: they run at the same time, then the rest of the longer one."""
        into, out = min(self.in_bandwidth, self.duplex_bandwidth), min(self.out_bandwidth, self.duplex_bandwidth)
        both = min(in_bytes / into, out_bytes / out)
        if both <= 0:
            return max(in_bytes / self.in_bandwidth, out_bytes / self.out_bandwidth)
        rest_in, rest_out = in_bytes - both * into, out_bytes - both * out
        return both + max(0.0, rest_in / self.in_bandwidth, rest_out / self.out_bandwidth)

    def with_duplex(self, each: float) -> Tiers:
        """These tiers with measured rates of each direction of the bus while both directions are busy.

        A direction alone is not slower. Where it was measured so, something else was using the bus.
        """
        alone = {"in_bandwidth": max(each, self.in_bandwidth), "out_bandwidth": max(each, self.out_bandwidth)}
        return dataclasses.replace(self, duplex_bandwidth=each, **alone)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer in a stack of layers that run in the same way.

    Attributes:
        base_bytes, layer_bytes: temporaries of a stack of n layers: base_bytes + n * layer_bytes.
        base_seconds, layer_seconds: likewise, time of a training step without waits for the bus.
        forward_seconds: the part of layer_seconds that the forward pass takes.
        stored_bytes: what one layer stores, if it does.
        ring_bytes: size of the device's ring.
    """

    base_bytes: float
    layer_bytes: float
    base_seconds: float
    layer_seconds: float
    forward_seconds: float = 0.0
    stored_bytes: int = 0
    ring_bytes: int = 0


def tiers_of(store: ActivationStore | None) -> Tiers:
    """Measures the bus, one direction at a time, and the drive of a store for activations."""
    tiers = Tiers(*bandwidths()) if on_gpu() else Tiers(float("inf"), float("inf"))
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
        return [calls.store(x, binding=here, site=site, ring_bytes=2 * tensor) for site in sites]

    @jax.jit
    def fetch(handles: list[Any]) -> Any:
        here, total = current.current_binding(), jnp.zeros((), jnp.uint32)
        for site, handle in zip(reversed(sites), reversed(handles), strict=True):
            total += calls.fetch(handle, x, (total,), binding=here, site=site)[0]
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


def scan_layers(body: Callable[[Any, Any], Any], params: Any, x: Any) -> Any:
    """`body` over the leading axis of `params`."""
    return jax.lax.scan(lambda x, p: (body(p, x), None), x, params)[0]


def some_layers(params: Any, length: int) -> Any:
    """`length` layers on the device: the first layers, repeated if there are fewer; arbitrary values for shapes."""

    def of(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jnp.full((length, *x.shape[1:]), 0.01, x.dtype)
        return jax.device_put(x[:length] if length <= x.shape[0] else x[np.arange(length) % x.shape[0]], _DEVICE)

    return jax.tree.map(of, params)


def short_stacks(run: Callable[[int], tuple[float, float]]) -> LayerCost:
    """The cost of a layer, from `run`: (number of layers) -> (bytes of temporaries, seconds) of a stack."""
    (few_bytes, few), (many_bytes, many) = map(run, SHORT)
    more = SHORT[1] - SHORT[0]
    layer_bytes = (many_bytes - few_bytes) / more
    layer = max(0.0, (many - few) / more)  # other work on the machine can make the shorter stack take longer
    return LayerCost(few_bytes - SHORT[0] * layer_bytes, layer_bytes, max(0.0, few - SHORT[0] * layer), layer)


def profile_stack(
    body: Callable[[Any, Any], Any], params: Any, x: Any, *, run: bool = True, gradient: bool = True
) -> LayerCost:
    """The cost of a layer in a training step, or in the forward pass alone; compiled, and run unless told otherwise."""

    def measured(count: int) -> tuple[float, float]:
        stack = functools.partial(scan_layers, body)
        step = training_step(stack) if gradient else jax.jit(stack)
        arguments = some_layers(params, count), x
        compiled = step.lower(*arguments).compile()
        temp = float(compiled.memory_analysis().temp_size_in_bytes)  # type: ignore[union-attr]
        return temp, timed(lambda: compiled(*arguments)) if run else 0.0

    return short_stacks(measured)


def training_step(stack: Callable[[Any, Any], Any]) -> Any:
    """The jitted `value_and_grad` of a stack."""

    def loss(params: Any, x: Any) -> Any:
        return sum((leaf.astype(jnp.float32) ** 2).mean() for leaf in jax.tree.leaves(stack(params, x)))

    return jax.jit(jax.value_and_grad(loss))


def timed(run: Callable[[], Any]) -> float:
    """Median seconds of a run, after three warm-up runs."""
    for _ in range(3):
        jax.block_until_ready(run())
    times: list[float] = []
    end = time.perf_counter() + _PROFILE_SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


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
    derivative = make_derivative(flat, shapes, is_activation, wanted)
    return [source.info for source in derivative.sources if source.stored], derivative.flops


def ring_of(store: ActivationStore | None, sizes: Sequence[int], flops: float) -> int:
    """Bytes of the device's ring for a layer that stores tensors of these sizes; 0 on the CPU."""
    if not on_gpu() or not sizes:
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
    on_device = [jax.device_put(np.full(nbytes // 4, i, np.float32), default_device()) for i in range(count)]
    on_host = jax.block_until_ready(jax.device_put(on_device, _HOST))

    def copy(arrays: list[Any], to: Any) -> Callable[[], Any]:
        return lambda: jax.device_put(arrays, to)

    ways = [copy(arrays[:n], to) for arrays, to in ((on_device, _HOST), (on_host, _DEVICE)) for n in (1, count)]
    out_one, out_all, in_one, in_all = fastest(ways, seconds=0.2)
    moved = (count - 1) * nbytes
    return moved / max(1e-9, out_all - out_one), moved / max(1e-9, in_all - in_one)


def there_and_back(row_bytes: int, length: int) -> Callable[[], Any]:
    """A function that starts a loop in which rows of an array in host memory come to the device and go back."""
    host = jax.sharding.SingleDeviceSharding(default_device(), memory_kind="pinned_host")

    def loop(arrays: list[Any]) -> list[Any]:
        moved = HostRows(arrays, [None], ahead=1)
        walk = Walk((0,), length, False, 1)
        ticket = moved.first_rows(moved.begin(), walk)

        def one(ticket: Any, _: Any) -> tuple[Any, None]:
            ticket, arrived = moved.take(ticket, walk)
            return moved.put(ticket, walk, (0,), arrived), None

        return moved.finish(jax.lax.scan(one, ticket, length=length)[0])

    run = jax.jit(loop, donate_argnums=0, in_shardings=host, out_shardings=host)
    held = [jax.device_put([np.zeros((length, row_bytes // 4), np.float32)], host)]

    def once() -> Any:
        held[0] = run(held[0])
        return held[0]

    return once


@functools.cache
def duplex_bandwidth(row_bytes: int = 32 << 20, lengths: tuple[int, int] = (4, 16)) -> float:
    """Bytes a second of each direction of the bus while both are busy; measured once in each process.

    The difference of two lengths leaves out the first row's way in and the last one's way out.
    """
    short, long = fastest([there_and_back(row_bytes, length) for length in lengths], seconds=0.1)
    return (lengths[1] - lengths[0]) * row_bytes / max(1e-9, long - short)
