"""What it costs the device and the launching thread that a step's state travels, besides the time of the bus.

Each array of a layer is copied from staging memory to XLA's buffers, and changed ones back. These copies are on the
stream of the step's arithmetic. The launching thread begins them and the copies over the bus.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.offload.plan.profile import device_bandwidth, fastest, timed
from dejax.offload.state.stream.chain import staging_bytes
from dejax.offload.state.stream.rows import HostRows, Walk


@dataclass(frozen=True, slots=True)
class Carried:
    """What the calls in a loop over layers carry.

    Attributes:
        nbytes: of all layers, to the device and from it.
        arrays: likewise, of one layer.
        calls: of one layer.
    """

    nbytes: float = 0.0
    arrays: int = 0
    calls: int = 0

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.nbytes + other.nbytes, self.arrays + other.arrays, self.calls + other.calls)


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Costs of carrying state.

    Attributes:
        bandwidth: bytes a second that a copy on the device reads and writes.
        array_seconds, call_seconds: of the device, for each array and each call, besides the bytes.
        launch_array_seconds, launch_call_seconds: likewise, of the launching thread.
    """

    bandwidth: float = float("inf")
    array_seconds: float = 0.0
    call_seconds: float = 0.0
    launch_array_seconds: float = 0.0
    launch_call_seconds: float = 0.0

    def on_device(self, carried: Carried, num_layers: int) -> float:
        """Seconds of the device for a loop."""
        each = carried.arrays * self.array_seconds + carried.calls * self.call_seconds
        return 2 * carried.nbytes / self.bandwidth + num_layers * each

    def launching(self, carried: Carried, num_layers: int) -> float:
        """Seconds of the launching thread for a loop."""
        return num_layers * (carried.arrays * self.launch_array_seconds + carried.calls * self.launch_call_seconds)


FREE = CopyCosts()


def there_and_back(count: int, row_bytes: int, length: int) -> Callable[[], Any]:
    """A function that starts a loop in which rows of `count` arrays in host memory come to the device and go back."""
    host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")

    def loop(arrays: list[Any]) -> list[Any]:
        moved = HostRows(arrays, staging_bytes([row_bytes] * count, 1, length))
        walk = Walk(tuple(range(count)), length, False, 1)
        ticket = moved.first_rows(moved.begin(), walk)

        def one(ticket: Any, _: Any) -> tuple[Any, None]:
            ticket, arrived = moved.take(ticket, walk)
            return moved.put(ticket, walk, range(count), arrived), None

        return moved.finish(jax.lax.scan(one, ticket, length=length)[0])

    run = jax.jit(loop, donate_argnums=0, in_shardings=host, out_shardings=host)
    held = [jax.device_put([np.zeros((length, row_bytes // 4), np.float32)] * count, host)]

    def once() -> Any:
        held[0] = run(held[0])
        return held[0]

    return once


@functools.cache
def duplex_bandwidth(row_bytes: int = 32 << 20, lengths: tuple[int, int] = (4, 16)) -> float:
    """Bytes a second of each direction of the bus while both are busy; measured once in each process.

    The difference of two lengths leaves out the first row's way in and the last one's way out.
    """
    short, long = fastest([there_and_back(1, row_bytes, length) for length in lengths], seconds=0.1)
    return (lengths[1] - lengths[0]) * row_bytes / max(1e-9, long - short)


@functools.cache
def copy_costs(arrays: int = 33, lengths: tuple[int, int] = (8, 24), width: int = 8192) -> CopyCosts:
    """Measures the costs by the loop that carries a step's state, with small arrays; once in each process.

    A loop by itself takes the launching thread's time, where that is longer than the device's. Behind other work of the
    device, during which all of the loop is launched, it takes the device's time.

    Args:
        arrays: a loop with so many of them is compared with one array.
        lengths: of loops with one array.
        width: of a matrix whose products are the other work.
    """
    row = 4096
    loops = [there_and_back(*how) for how in ((1, row, lengths[0]), (arrays, row, lengths[0]), (1, row, lengths[1]))]
    alone = fastest(loops, seconds=0.1)
    matrix = jnp.zeros((width, width), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    times = math.ceil(2 * max(alone) / max(1e-9, timed(lambda: product(matrix), seconds=0.02)))

    def behind(run: Callable[[], Any]) -> Any:
        return [product(matrix) for _ in range(times)][-1:], run()

    hidden = fastest([functools.partial(behind, run) for run in loops], seconds=0.2)
    (array, call), (launch_array, launch_call) = (_slopes(took, arrays, lengths) for took in (hidden, alone))
    return CopyCosts(device_bandwidth(), array, call, launch_array, launch_call)


def _slopes(took: list[float], arrays: int, lengths: tuple[int, int]) -> tuple[float, float]:
    """Seconds for each array and for each call, from the times of three loops. A row has two calls, there and back."""
    few, many, long = took
    array = max(0.0, (many - few) / (2 * lengths[0] * (arrays - 1)))
    return array, max(0.0, (long - few) / (2 * (lengths[1] - lengths[0])) - array)
