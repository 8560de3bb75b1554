"""The counters of a store, and their summary."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of an `ActivationStore`: bytes, counts and seconds since the store was opened, unless stated otherwise.

    Attributes:
        stored_bytes, stored_count: tensors that forward passes stored.
        fetched_bytes, fetched_count: tensors that backward passes fetched.
        ring_hit_bytes: fetched tensors that were still on the device, so that no copy was needed.
        prefetched_bytes: fetched tensors that had been copied back to the device before they were needed.
        demand_bytes: fetched tensors that were copied only when they were needed (on the CPU: all).
        copied_out_bytes: bytes copied from device to host memory.
        forwarded_bytes: with a disk tier: bytes fetched from host memory without a read from disk.
        written_bytes, read_bytes: bytes written to and read from disk.
        cancelled_bytes: tensors that were fetched before their write to disk had ended.
        dropped_count: tensors that were dropped without being fetched (a failed step, `clear`, a full store).
        store_stall_seconds, fetch_stall_seconds: time that launch threads waited for room or for the disk, in forward
            and in backward passes.
        launch_seconds: time that launch threads spent in the store, waits included.
        device_store_stall_seconds, device_fetch_stall_seconds: time that the devices waited for copies, in forward and
            in backward passes.
        live_bytes, live_count: tensors that are stored and not yet fetched, now.
        peak_live_bytes: largest value of live_bytes.
        host_bytes, disk_bytes, ring_bytes: bytes that are allocated in each tier, now.
        peak_host_bytes: largest value of host_bytes.
        runs: number of executions that stored something.
        drive_written_bytes: bytes that all processes wrote to the drives of the paths; 0 if the system does not tell.
        open_seconds: seconds since the store was opened.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.offload import ActivationStore, offload
    >>> layer = offload(lambda w, x: jnp.tanh(x @ w), min_bytes=0)
    >>> with ActivationStore() as store:
    ...     gradient = jax.block_until_ready(jax.grad(lambda w: layer(w, jnp.ones((2, 3))).sum())(jnp.eye(3)))
    ...     stats = store.stats()
    >>> stats.stored_count == stats.fetched_count > 0, stats.live_count
    (True, 0)
    """

    stored_bytes: int
    stored_count: int
    fetched_bytes: int
    fetched_count: int
    ring_hit_bytes: int
    prefetched_bytes: int
    demand_bytes: int
    copied_out_bytes: int
    forwarded_bytes: int
    written_bytes: int
    read_bytes: int
    cancelled_bytes: int
    dropped_count: int
    store_stall_seconds: float
    fetch_stall_seconds: float
    launch_seconds: float
    device_store_stall_seconds: float
    device_fetch_stall_seconds: float
    live_bytes: int
    live_count: int
    peak_live_bytes: int
    host_bytes: int
    peak_host_bytes: int
    disk_bytes: int
    ring_bytes: int
    runs: int
    drive_written_bytes: int
    open_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The counters as a dict, for JSON."""
        return dataclasses.asdict(self)

    @property
    def saving(self) -> float:
        """The share of the stored bytes that lay outside of device memory at the time when the store held most."""
        return max(0.0, 1 - self.ring_bytes / self.peak_live_bytes) if self.peak_live_bytes else 0.0

    @property
    def waited_seconds(self) -> float:
        """Seconds that launch threads and devices have waited for tensors to be stored or fetched."""
        launches = self.store_stall_seconds + self.fetch_stall_seconds
        return launches + self.device_store_stall_seconds + self.device_fetch_stall_seconds

    def lifetime_years(self, endurance_bytes: float) -> float:
        """Years until a drive with this rated endurance (bytes written) is worn out at the present rate of writing."""
        written = max(self.drive_written_bytes, self.written_bytes)
        if written == 0:
            return float("inf")
        return endurance_bytes / (written / self.open_seconds) / (365.25 * 86400)

    def line(self) -> str:
        """The counters as one short line, for a progress bar."""
        disk = f", {_size(self.written_bytes)} to disk" if self.written_bytes else ""
        return (
            f"offload {_size(self.peak_live_bytes)} a step, {100 * self.saving:.0f} % off{disk}, "
            f"waited {self.waited_seconds:.1f} s"
        )

    def summary(self, *, endurance_bytes: float | None = None) -> str:
        """The main counters as text."""
        lines = [
            f"offload: {_size(self.stored_bytes)} stored in {self.runs} runs, at most "
            f"{_size(self.peak_live_bytes)} at a time",
            f"  fetched {_size(self.fetched_bytes)}: {_size(self.ring_hit_bytes)} still on the device, "
            f"{_size(self.prefetched_bytes)} ahead of time, {_size(self.demand_bytes)} on demand",
            f"  held: {_size(self.ring_bytes)} on devices, {_size(self.host_bytes)} of host memory, "
            f"{_size(self.disk_bytes)} of disk",
            f"  launches waited {self.store_stall_seconds:.2f} s for room and {self.fetch_stall_seconds:.2f} s for "
            f"data, devices {self.device_store_stall_seconds:.2f} and {self.device_fetch_stall_seconds:.2f} s; "
            f"{self.dropped_count} tensors dropped",
            f"  off the device at the peak: {100 * self.saving:.0f} % of what was stored",
        ]
        if self.written_bytes or self.read_bytes or self.cancelled_bytes:
            lines.append(
                f"  disk: {_size(self.written_bytes)} written ({_size(self.drive_written_bytes)} by the drive), "
                f"{_size(self.read_bytes)} read, {_size(self.forwarded_bytes)} served from memory, writes of "
                f"{_size(self.cancelled_bytes)} cancelled"
            )
            if endurance_bytes is not None:
                lines.append(
                    f"  at this rate a drive rated for {endurance_bytes / 1e12:.0f} TB lasts "
                    f"{self.lifetime_years(endurance_bytes):.1f} years"
                )
        return "\n".join(lines)


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 1e3:.2f} kB" if nbytes else "0 bytes"
