"""The CPU sampler of hetero_sampler.cc, and its gather. g++ compiles them on first use; calls release the GIL."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

EdgeType = tuple[str, str, str]


def compiled() -> ctypes.CDLL:
    """The library.

    Raises:
        OSError, subprocess.CalledProcessError: there is no g++, or it fails.
    """
    options = "-O3 -march=native -std=c++17 -shared -fPIC".split()
    source = Path(__file__).with_name("hetero_sampler.cc")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "hetero_sampler.so")
        subprocess.run([os.environ.get("CXX", "g++"), *options, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of one batch.

    Attributes:
        nodes: by type, int32 ids; those of the seeds first, then those of each hop.
        node_counts: [hops + 1, types], nodes after each hop.
        edge_counts: [hops, relations], edges after each hop.
    """

    nodes: dict[str, np.ndarray]
    node_counts: np.ndarray
    edge_counts: np.ndarray


class HeteroSampler:
    """Samples batches on the calling thread. Each thread has a sampler of its own; they share the edge lists.

    Args:
        csc: (starts, senders), int32, by relation.
        num_nodes: nodes by type.
        fan_outs: for each hop, by relation.
        library: of `compiled`.
    """

    def __init__(
        self,
        csc: Mapping[EdgeType, tuple[np.ndarray, np.ndarray]],
        num_nodes: Mapping[str, int],
        fan_outs: Sequence[Mapping[EdgeType, int]],
        library: ctypes.CDLL,
    ) -> None:
        self.types, self.relations, self.hops = list(num_nodes), list(csc), len(fan_outs)
        self._library, self._csc = library, csc
        place = {name: k for k, name in enumerate(self.types)}
        self._ends = [np.array([place[r[side]] for r in self.relations], np.int32) for side in (0, 2)]
        self._fan_outs = np.array([[hop.get(r, 0) for r in self.relations] for hop in fan_outs], np.int32)
        self._number = [np.full(count, -1, np.int32) for count in num_nodes.values()]
        self._ids = [np.empty(count, np.int32) for count in num_nodes.values()]

    def __call__(self, seed_type: str, seeds: np.ndarray, edges: Mapping[EdgeType, np.ndarray], key: int) -> Sample:
        """A sample whose nodes are views of memory that the next call overwrites.

        Args:
            seed_type: their type.
            seeds: int32 ids, distinct.
            edges: int64[2, room] by relation, which gets local senders and receivers.
            key: seed of the draws.

        Raises:
            ValueError: `edges` have no room for the sample.
        """
        nodes = np.zeros((self.hops + 1, len(self.types)), np.int64)
        counts = np.zeros((self.hops, len(self.relations)), np.int64)
        room = np.array([edges[r].shape[1] for r in self.relations], np.int64)
        failed = self._library.sample_hetero(
            len(self.types), len(self.relations), self.hops,
            _pointers([self._csc[r][0] for r in self.relations]), _pointers([self._csc[r][1] for r in self.relations]),
            *map(_address, (*self._ends, self._fan_outs)), self.types.index(seed_type), _address(seeds),
            ctypes.c_int64(len(seeds)), _pointers(self._number), _pointers(self._ids),
            _pointers([edges[r][0] for r in self.relations]), _pointers([edges[r][1] for r in self.relations]),
            _address(room), _address(nodes), _address(counts), ctypes.c_uint64(key),
        )  # fmt: skip
        if failed:
            raise ValueError(f"the sample does not fit in the room for edges, {room.tolist()}")
        return Sample({name: self._ids[k][: nodes[-1, k]] for k, name in enumerate(self.types)}, nodes, counts)

    def gather(self, table: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
        """`out[:len(ids)] = table[ids]`, on the calling thread."""
        row_bytes = table.dtype.itemsize * table.shape[1]
        self._library.gather_rows(
            _address(table), ctypes.c_int64(row_bytes), _address(ids), ctypes.c_int64(len(ids)), _address(out)
        )


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _pointers(arrays: Sequence[np.ndarray]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
