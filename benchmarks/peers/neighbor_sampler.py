"""The CPU sampler of neighbor_sampler.cc. g++ compiles it on first use."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class NeighborSampler:
    """Samples with all threads of the machine, or with `threads` of them.

    Raises:
        OSError, subprocess.CalledProcessError: there is no g++, or it fails.
    """

    def __init__(self, starts: np.ndarray, senders: np.ndarray, threads: int | None = None) -> None:
        options = "-O3 -march=native -std=c++17 -shared -fPIC -pthread".split()
        source = Path(__file__).with_name("neighbor_sampler.cc")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "neighbor_sampler.so")
            subprocess.run([os.environ.get("CXX", "g++"), *options, str(source), "-o", str(library)], check=True)
            self._sample = ctypes.CDLL(str(library)).sample
        self._sample.restype = ctypes.c_int64
        self.threads = threads or os.cpu_count() or 1
        self._starts, self._senders = starts, senders
        self._number = np.full(len(starts) - 1, -1, np.int32)
        self._room: list[np.ndarray] = []

    def __call__(
        self, seeds: np.ndarray, fan_outs: Sequence[int], key: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Node ids, and local senders and receivers: views of memory that the next call overwrites."""
        most = frontier = len(seeds)
        edges = 0
        for fan_out in fan_outs:
            edges += frontier * fan_out
            frontier = min(frontier * fan_out, len(self._number) - most)
            most += frontier
        if not self._room or len(self._room[0]) < most or len(self._room[1]) < edges:
            self._room = [np.zeros(most, np.int32), np.zeros(edges, np.int32), np.zeros(edges, np.int32)]

        def address(array: np.ndarray) -> ctypes.c_void_p:
            return ctypes.c_void_p(array.ctypes.data)

        nodes, draws = ctypes.c_int64(), np.asarray(fan_outs, np.int32)
        count = self._sample(
            address(self._starts), address(self._senders), address(seeds), ctypes.c_int64(len(seeds)), address(draws),
            ctypes.c_int(len(draws)), ctypes.c_int(self.threads), ctypes.c_uint64(key), address(self._number),
            *map(address, self._room), ctypes.byref(nodes),
        )  # fmt: skip
        return self._room[0][: nodes.value], self._room[1][:count], self._room[2][:count]
