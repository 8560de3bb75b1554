"""GraphBolt's feature on a disk with its cache in host memory, on the ids that `benchmarks/drive.py` gives.

    python graphbolt_disk.py LIBRARY rows.npy ids.npy CACHE_ROWS WARM

LIBRARY is GraphBolt's shared library, or one of its files `io_uring`, `cnumpy`, `feature_cache`, `cache_policy`,
`partitioned_cache_policy`, `index_select` and `utils` with their part of `python_binding.cc`: DGL's newest
wheel for Linux on PyPI has no feature on a disk. `read` is `CPUCachedFeature.read` with a `DiskBasedFeature` below it.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch


class CachedFeature:
    """Rows of a file, through a cache with GraphBolt's default policy and numbers of threads."""

    def __init__(self, path: str, cache_rows: int) -> None:
        shape, ops = np.load(path, mmap_mode="r").shape, torch.ops.graphbolt
        self.disk = ops.ondisk_npy_array(path, torch.float32, list(shape), None)
        self.policy = ops.sieve_cache_policy(cache_rows, torch.get_num_threads())
        self.cache = ops.feature_cache([cache_rows, *shape[1:]], torch.float32, False)
        self.missed = 0

    def read(self, ids: Any) -> Any:
        positions, index, pointers, missing, in_found, in_missing = self.policy.query_and_replace(ids, 0)
        found = len(ids) - len(missing)
        rows = self.cache.query(positions[:found], index, len(ids))
        self.policy.reading_completed(pointers[:found], in_found)
        self.missed += len(missing)
        new = self.disk.index_select(missing).wait()
        rows[index[found:]] = new
        self.cache.replace(positions[found:], new)
        self.policy.writing_completed(pointers[found:], in_missing)
        return rows


def main(library: str, path: str, ids_path: str, cache_rows: int, warm: int) -> None:
    torch.ops.load_library(library)
    batches = torch.from_numpy(np.load(ids_path).astype(np.int64))
    feature = CachedFeature(path, cache_rows)
    for ids in batches[:warm]:
        feature.read(ids)
    feature.missed = 0
    begin, cpu = time.perf_counter(), time.process_time()
    for ids in batches[warm:]:
        assert torch.equal(feature.read(ids)[:, 0].long(), ids), "wrong rows"
    seconds, used, count = time.perf_counter() - begin, time.process_time() - cpu, len(batches) - warm
    missed = feature.missed / batches[warm:].numel()
    print(json.dumps({"ms": 1e3 * seconds / count, "cpu_ms": 1e3 * used / count, "missed": missed}))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))
