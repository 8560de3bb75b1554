"""What an open store holds: folders on drives, its native part, threads. It is given back once."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dejax.offload import _files

_open: dict[int, StoreResources] = {}
"""The resources of open stores, by `id`, for the end of the process. Changes are atomic under the GIL."""

_PAGE = 4096


def check_sizes(owner: str, chunk_bytes: int, io_threads: int, **sizes: int | None) -> None:
    """Raises ValueError for a size of a store that is out of range; `owner` begins the message."""
    for name, value in sizes.items():
        if value is not None and value < 0:
            raise ValueError(f"{owner}: `{name}` must be at least 0 or None, got {value}")
    if chunk_bytes <= 0 or chunk_bytes % _PAGE:
        raise ValueError(f"{owner}: `chunk_bytes` must be a positive multiple of {_PAGE}, got {chunk_bytes}")
    if io_threads < 1:
        raise ValueError(f"{owner}: `io_threads` must be at least 1, got {io_threads}")


class Store:
    """What `ActivationStore` and `StateStore` have in common: they belong to one process."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: a store must not be pickled or copied: its memory, files and threads belong to "
            "this process; make another one where it is needed"
        )


class StoreResources:
    """The resources of a store. They are released once: by `close`, with the last reference to the store, or at exit.

    Attributes:
        process: the process that opened the store.
        claims: the store's folders.
        native: the store in C++, or None.
    """

    def __init__(self, store: Any) -> None:
        self.process = os.getpid()
        self.claims: list[_files.Claim] = []
        self.native: Any = None
        self._to_close = [None]
        _open[id(self)] = self
        # The finalizer does not run at the end of the process, when jax may be gone: `_close_all` runs earlier.
        weakref.finalize(store, self.abandon).atexit = False

    @property
    def is_open(self) -> bool:
        """Whether the resources are not given back yet and belong to this process."""
        return bool(self._to_close) and self.process == os.getpid()

    def claim(self, paths: Sequence[Path], owner: str) -> list[Path]:
        """Makes a folder in each path; `owner` begins the messages of errors."""
        for place in paths:
            self.claims.append(_files.claim(place, owner))
        return [claim.folder for claim in self.claims]

    def close(self) -> None:
        """Ends the store, then removes its folders. A second call does nothing, nor does one in a forked child."""
        if self.process != os.getpid():
            return  # threads, memory and files belong to its parent
        try:
            self._to_close.pop()
        except IndexError:
            return
        try:
            self._end()
        finally:
            for claim in self.claims:
                claim.release()
            _open.pop(id(self), None)

    def _end(self) -> None:
        if self.native is not None:
            self.native.close()

    def abandon(self) -> None:
        """Closes a store that has no references. The garbage collector may call this in any thread."""
        self.close()

    def forget(self) -> None:
        """In a forked child: a file's lock would last as long as any process has the file open."""
        for claim in self.claims:
            claim.forget()


@atexit.register
def _close_all() -> None:
    for resources in list(_open.values()):
        resources.close()


def _after_fork() -> None:
    for resources in list(_open.values()):
        resources.forget()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
