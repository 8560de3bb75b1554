"""Ends a job within seconds if one of its processes dies or has different data, with a message that names the process.

`jax.distributed` has a store of keys and values on process 0. Each process writes a growing number (a beat) into it,
and reads the numbers of the others. A process whose number does not change for some time counts as gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import jax
import jaxlib
import numpy as np

import dejax
from dejax import _compat
from dejax.host_gather.tables.table import is_table_of_host, numpy_copy

EXIT_STATUS = 75
"""The exit status (75) of a process that `watch` ends because another process is gone. A launcher may start the job
again.
"""

_PREFIX = "dejax"
_COLLECTIVE_WORDS = ("gloo", "nccl", "coordination", "connection", "deadline", "unavailable", "barrier", "heartbeat")
_SECONDS_TO_JOIN = 10.0  # a call of the coordination service that is gone returns within this time
_rounds = 0  # calls of check_agreement


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 20.0,
    **options: Any,
) -> None:
    """Starts `jax.distributed` with collectives that also work on CPU devices (gloo), and calls `watch`.

    Call `initialize` before any other function of jax. Under SLURM or Open MPI, or where environment variables such as
    `JAX_COORDINATOR_ADDRESS` are set, jax finds the first three arguments itself.

    Args:
        coordinator_address: host and port of process 0, such as "10.0.0.1:1234".
        num_processes: number of processes of the job.
        process_id: number of this process, from 0.
        timeout: seconds without a sign of life after which a process counts as gone, as in `watch`.
        options: further keyword arguments of `jax.distributed.initialize`.

    >>> from dejax.distributed import initialize
    >>> initialize("10.0.0.1:1234", num_processes=4, process_id=0)  # doctest: +SKIP
    """
    if jax.config.values.get("jax_cpu_collectives_implementation") in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _register_last()  # it runs after jax's own functions, which are registered later
    jax.distributed.initialize(coordinator_address, num_processes, process_id, **options)
    watch(timeout)


def watch(timeout: float = 20.0, *, interval: float | None = None) -> None:
    """Ends this process with a message if another process of the job dies, hangs, or raises an error.

    Without `watch`, the remaining processes wait in a collective operation, or end with a message that does not say
    which process is missing. With it they print the missing process and the time of its last sign of life, and end with
    the status `EXIT_STATUS`. A job that is started again can continue from its last checkpoint (`restore`). Call
    `watch` once, after `jax.distributed.initialize`; `dejax.distributed.initialize` calls it for you. In a job of one
    process `watch` does nothing.

    Args:
        timeout: seconds without a sign of life after which a process counts as gone. A process that compiles or waits
            still gives signs of life.
        interval: seconds between two signs of life; by default a tenth of `timeout`, at most 1.

    Raises:
        ValueError: `timeout` is not larger than `interval`.
        RuntimeError: `jax.distributed` is not initialized.

    >>> from dejax.distributed import watch
    >>> jax.distributed.initialize()  # doctest: +SKIP
    >>> watch(timeout=60)  # doctest: +SKIP
    """
    global _watch
    client, own, count, address = _compat.coordination()
    interval = min(1.0, timeout / 10) if interval is None else interval
    if not 0 < interval < timeout:
        raise ValueError(f"watch: `timeout` must be above `interval`, got {timeout} and {interval}")
    if client is None:
        raise RuntimeError("watch: `jax.distributed` must be initialized; call dejax.distributed.initialize instead")
    if count == 1 or _watch is not None:
        return
    _register_last()
    _watch = _Watch(client, own, count, address, timeout, interval)
    _watch.start()


_watch: _Watch | None = None


@dataclasses.dataclass(slots=True)
class _Peer:
    """Another process: its last beat, and when this process saw it change."""

    beat: str = ""
    changed: float = dataclasses.field(default_factory=time.monotonic)


class _Watch:
    """Threads that write this process's beats, and judge those of the others."""

    def __init__(self, client: Any, own: int, count: int, address: str, timeout: float, interval: float) -> None:
        self.client, self.own, self.count, self.address = client, own, count, address
        self.timeout, self.interval = timeout, interval
        self.peers = {number: _Peer() for number in range(count) if number != own}
        self.answered = time.monotonic()  # when the store of keys last answered
        self.stopped = threading.Event()
        self.raised = False  # whether this process ends by an exception of its own
        self.ending = threading.Lock()
        self.threads = [
            threading.Thread(target=self._beat, name="dejax-beat", daemon=True),
            threading.Thread(target=self._judge, name="dejax-watch", daemon=True),
        ]

    def start(self) -> None:
        self._set("host", socket.gethostname())
        for thread in self.threads:
            thread.start()
        _on_abort(self)
        self._former_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._finished)

    # -------------------------------------------------------------------------------------------- beats

    def _set(self, kind: str, value: str) -> None:
        self.client.key_value_set(f"{_PREFIX}/{kind}/{self.own}", value, allow_overwrite=True)

    def _get(self, kind: str) -> dict[int, str]:
        found = self.client.key_value_dir_get(f"{_PREFIX}/{kind}/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in found}

    def _beat(self) -> None:
        """The watching thread: gives signs of life, reads those of the others, and ends this process if one ended."""
        number = 0
        while not self.stopped.is_set():
            number += 1
            with contextlib.suppress(Exception):  # without an answer, `answered` stays
                self._set("beat", str(number))
                beats, now = self._get("beat"), time.monotonic()
                ended = self._get("end")
                for process, peer in self.peers.items():
                    if ended.get(process) == "finished":
                        peer.changed = now  # it needs no beats any more
                    elif process in ended:
                        self.end(f"process {process} ended: {ended[process]}")
                    elif beats.get(process, "") != peer.beat:
                        peer.beat, peer.changed = beats[process], now
                self.answered = now
            self.stopped.wait(self.interval)

    def _judge(self) -> None:
        last = time.monotonic()
        while not self.stopped.wait(self.interval / 2):
            now = time.monotonic()
            if now - last > self.timeout / 2:  # this process itself was stopped: give the others their time again
                self.answered = now
                for peer in self.peers.values():
                    peer.changed = now
            last = now
            if found := self.missing(now):
                self.end(found)

    def missing(self, now: float) -> str | None:
        """A sentence about a process that is gone."""
        if now - self.answered > self.timeout:
            if self.own == 0:
                return None
            return (
                f"process 0 ({self.address}) has not answered for {now - self.answered:.0f} s. It holds the store of "
                "keys of jax.distributed"
            )
        late = {number: now - peer.changed for number, peer in self.peers.items() if now - peer.changed > self.timeout}
        if not late or now - self.answered > self.timeout / 2:
            return None
        hosts: dict[int, str] = {}
        with contextlib.suppress(Exception):
            hosts = self._get("host")
        names = ", ".join(f"process {number} on {hosts.get(number, 'an unknown host')}" for number in sorted(late))
        return f"{names}: no sign of life for {max(late.values()):.0f} s. It was killed, or it hangs"

    # -------------------------------------------------------------------------------------------- ends

    def end(self, why: str) -> None:
        """Prints why, and ends this process at once: its main thread may wait for ever."""
        if not self.ending.acquire(blocking=False):
            time.sleep(60)  # another thread ends the process
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        say(f"process {self.own} of {self.count} ends: {why}. Start the job again from its last checkpoint")
        os._exit(EXIT_STATUS)

    def _on_exception(self, kind: Any, error: Any, trace: Any) -> None:
        self._former_hook(kind, error, trace)
        text = "".join(traceback.format_exception_only(kind, error)).strip().splitlines()[-1][:300]
        lowered = str(error).lower()
        if any(word in lowered for word in _COLLECTIVE_WORDS):
            # A collective operation failed: another process is gone, and the watch will say which.
            time.sleep(self.timeout + 4 * self.interval)
        with contextlib.suppress(Exception):
            self._set("end", text)
        if self.own == 0:
            time.sleep(3 * self.interval)  # the store of keys ends with this process: let the others read why
        self.stopped.set()
        self.raised = True
        _compat.leave_coordination()
        timer = threading.Timer(10.0, os._exit, (1,))  # functions that run at exit may wait for the others
        timer.daemon = True
        timer.start()

    def _finished(self) -> None:
        if self.stopped.is_set():
            return
        with contextlib.suppress(Exception):
            self._set("end", "finished")

    def join(self, timeout: float) -> None:
        """Ends the threads. One that came back from jax's C++ code after Python's end would abort the process."""
        self.stopped.set()
        for thread in self.threads:
            thread.join(timeout)

    def on_abort(self) -> None:
        """Called when jax aborts this process: the coordination service reported an error, or is gone."""
        if self.raised:  # the message is above
            os._exit(1)
        if not self.ending.acquire(blocking=False):
            return
        why = "jax.distributed reported an error (above)"
        if self.own != 0 and not _listens(self.address):
            why = f"process 0 ({self.address}), which holds the coordination service, is gone"
        elif found := self.missing(time.monotonic()):
            why = found
        say(f"process {self.own} of {self.count} ends: {why}. Start the job again from its last checkpoint")


def say(text: str) -> None:
    """Writes a line to stderr, also where Python's own stream cannot."""
    with contextlib.suppress(OSError):
        os.write(2, f"dejax.distributed: {text}\n".encode())


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except (OSError, ValueError):
        return False
    return True


# -------------------------------------------------------------------------------------------- aborts
# When process 0 dies, jax's client aborts the process from a thread of its own. Python's signal handlers never run
# then, so the handler is a C function that calls Python.

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handler: Any = None


def _on_abort(watched: _Watch) -> None:
    global _handler

    def aborted(_: int) -> None:
        with contextlib.suppress(BaseException):
            watched.on_abort()
        os._exit(EXIT_STATUS)

    _handler = _HANDLER(aborted)
    _set_handler(ctypes.cast(_handler, ctypes.c_void_p))


@functools.cache
def _register_last() -> None:
    atexit.register(_last_at_exit)


def _last_at_exit() -> None:
    if _watch is not None and _watch.raised:
        # jax's threads still wait for the coordination service, and abort the process when it is gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if _watch is not None:
        _watch.join(_SECONDS_TO_JOIN)
    if _handler is not None:
        _set_handler(ctypes.c_void_p(0))  # the default: Python is about to end


def _set_handler(handler: ctypes.c_void_p) -> None:
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    function(signal.SIGABRT, handler)


# -------------------------------------------------------------------------------------------- agreement


class DisagreementError(ValueError):
    """The processes of a job were started with different data, settings or versions. `check_agreement` raises it.

    >>> from dejax.distributed import DisagreementError, check_agreement
    >>> try:
    ...     facts = check_agreement(batch=512)  # every process returns, or every process raises
    ... except DisagreementError as error:
    ...     raise SystemExit(f"start all processes with the same settings: {error}")
    """


def check_agreement(*, timeout: float = 120.0, **facts: Any) -> dict[str, str]:
    """Checks that all processes pass equal values, and that they run the same versions of jax, jaxlib and dejax.

    Call it before the first step. Processes with different values (a batch size, a number of nodes) would compile
    different programs and wait for each other for ever. In a job of one process the call only returns the values as
    text.

    Args:
        timeout: seconds to wait for the other processes.
        facts: the values to compare, by name: numbers, strings, arrays, tables or pytrees of them, such as a topology
            or a batch of seeds. Arrays are compared by a digest of the bytes that each process can read.

    Returns:
        The values of this process as text, by name, and the versions.

    Raises:
        DisagreementError: two processes passed different values. All processes raise it; the message has the name and
            the value of each process.
        TimeoutError: a process did not call `check_agreement` in time; the message names the process.

    >>> check_agreement(nodes=4, seeds=np.arange(3))["nodes"]
    '4'
    """
    global _rounds
    own_facts = {name: fact_text(value) for name, value in facts.items()}
    own_facts |= {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "dejax": dejax.__version__}
    client, own, count, _ = _compat.coordination()
    if client is None or count == 1:
        return own_facts
    _rounds += 1
    place = f"{_PREFIX}/agree/{_rounds}"
    client.key_value_set(f"{place}/{own}", json.dumps(own_facts), allow_overwrite=True)
    deadline, found = time.monotonic() + timeout, {}
    for process in range(count):
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            found[process] = json.loads(client.blocking_key_value_get(f"{place}/{process}", left))
        except Exception as error:
            raise TimeoutError(
                f"check_agreement: process {process} did not call it within {timeout:g} s of process {own}"
            ) from error
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    wrong = [_difference(name, {p: each.get(name, "(not given)") for p, each in found.items()}) for name in names]
    if any(wrong):
        raise DisagreementError(
            f"check_agreement: all processes must have the same {'; the same '.join(text for text in wrong if text)}"
        )
    return own_facts


def _difference(name: str, values: dict[int, str]) -> str:
    by_value: dict[str, list[int]] = {}
    for process, value in values.items():
        by_value.setdefault(value, []).append(process)
    if len(by_value) == 1:
        return ""
    return f"`{name}`, got " + ", ".join(
        f"{value} on process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"
        for value, processes in by_value.items()
    )


def fact_text(value: Any) -> str:
    """A fact as short text: the value, or a digest of its arrays."""
    if value is None or isinstance(value, bool | int | float | str | np.number):
        return str(value)
    leaves, tree = jax.tree.flatten(value, is_leaf=is_table_of_host)
    digest, size = hashlib.sha256(str(tree).encode()), 0
    for leaf in leaves:
        for array in _visible(leaf):
            digest.update(f"{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
            size += array.size
    return f"digest {digest.hexdigest()[:16]} of {size:,} elements"


def _visible(leaf: Any) -> list[np.ndarray]:
    """The values of a leaf that this process can read; nothing of an array that is divided over processes."""
    if is_table_of_host(leaf):
        return [leaf._host_part.numpy(), *(array for some in leaf._on_device for array in _visible(some))]
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return [numpy_copy(leaf)] if leaf.is_fully_addressable or leaf.is_fully_replicated else []
    return [np.asarray(leaf)]


__all__ = ["EXIT_STATUS", "DisagreementError", "check_agreement", "initialize", "watch"]
