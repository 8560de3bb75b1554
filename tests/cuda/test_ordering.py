"""Kernels that sort, sum and number: their text run by fibers on a CPU, and on a GPU beside XLA."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.cuda import ordering
from dejax.minibatch.sampling import _numbering
from dejax.minibatch.sampling._numbering import Nodes, NumberRanges
from dejax.rgnn.graphs.building import sorting_traced

CXX = shutil.which("g++")
HERE = Path(__file__).parent
PARTS, THREADS = 2, 256  # fewer than on a GPU: a fiber is a thread with a stack
# A row with fewer entries than threads, one whose parts end within a warp, and one of several tiles and passes.
SIZES = (3, 1001, 4500)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as functions of (programs, pointers)."""
    if CXX is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("ordering")
    path = folder / "ordering.so"
    definitions = [f"-D{name}" for name in ("SORT_PAIRS", "SUMS", "NUMBER", f"PARTS={PARTS}", f"THREADS={THREADS}")]
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{ordering._SOURCE.parent}", *definitions]
    subprocess.run([CXX, *flags, str(HERE / "ordering_on_cpu.cc"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def run(library, name, rows, *arrays):
    pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    getattr(library, name)(rows * PARTS, pointers)


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_sorted_and_summed(library, size):
    rng, rows = np.random.default_rng(size), 2
    for bits, with_values in ((0, False), (1, True), (13, False), (32, True)):
        keys = rng.integers(0, 1 << bits, (rows, size), dtype=np.uint32)
        values = rng.integers(0, 1 << 30, (rows, size)).astype(np.int32)
        found, spare = (np.zeros_like(keys), np.zeros_like(values)), np.zeros((2, rows, size), np.uint64)
        sizes, bins = np.array([size, bits, with_values], np.int32), np.zeros((rows, PARTS * 256), np.uint32)
        before = keys.copy(), values.copy()
        run(library, "sort_pairs", rows, keys, values, sizes, *found, *spare, bins)
        order = np.argsort(before[0], axis=1, kind="stable")
        wanted = np.take_along_axis(before[1], order, 1) if with_values else order
        np.testing.assert_array_equal(found[0], np.take_along_axis(before[0], order, 1))
        np.testing.assert_array_equal(found[1], wanted)
        np.testing.assert_array_equal(keys, before[0])
    x, sums = values % 1000, np.zeros_like(values)
    run(library, "sums", rows, x, np.array([size], np.int32), sums, np.zeros((rows, PARTS), np.int32))
    np.testing.assert_array_equal(sums, np.cumsum(x, axis=1))


@functools.cache
def nodes_of_types(seed: int, counts: tuple[int, ...], found: int):
    """Known nodes and found ones, both with types; the last type gets fewer places than it has new nodes."""
    rng = np.random.default_rng(seed)
    total, known = sum(counts), 40
    types = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    within = np.concatenate([np.arange(n) for n in counts]).astype(np.int32)
    some, more = np.sort(rng.permutation(total)[:known]), rng.integers(0, total, found)
    old = np.where(rng.random(known) < 0.8, within[some], -1).astype(np.int32), types[some]
    new = np.where(rng.random(found) < 0.9, within[more], -1).astype(np.int32), types[more]
    sizes = [min(n, found) for n in counts[:-1]] + [min(2, counts[-1])]
    first = known + np.cumsum([0, *sizes])[:-1]
    return old, new, NumberRanges(counts, tuple(first.tolist()), tuple(sizes))


CASES = [((500,), 900), ((30, 0, 700, 50), 3000), ((60, 8), 7)]


@pytest.mark.parametrize(("counts", "found"), CASES)
def test_nodes_are_numbered_as_by_a_sort(library, counts, found):
    old, new, places = nodes_of_types(0, counts, found)
    bases = np.cumsum([0, *counts])
    keys = np.concatenate([np.where(n >= 0, n + bases[t], bases[-1]) for n, t in (old, new)]).astype(np.uint32)
    size, known = len(keys), len(old[0])
    total, ends = known + sum(places.sizes), np.add(places.first, places.sizes)
    sizes = [size, int(bases[-1]).bit_length(), known, bases[-1], total, len(counts), *bases[:-1], *places.first, *ends]
    results = [np.full(n, -7, np.int32) for n in (total, found, len(counts))]
    scratch = [np.zeros(n, np.uint32) for n in (2 * size, 2 * size, size, PARTS * 256)]
    run(library, "number", 1, keys, np.array(sizes, np.int32), *results, *scratch)
    want = jax.jit(lambda a, b: _by_sort(a, b, old[1], new[1], places))(old[0], new[0])
    jax.tree.map(np.testing.assert_array_equal, tuple(results), want)


def _by_sort(a, b, types, more, places):
    after, *rest = _numbering.by_sort(Nodes(a, types), Nodes(b, more), places)
    return after.nodes, *rest


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2049, 16_384, 113_664, ordering.LONGEST])
def test_a_gpu_sorts_and_sums_as_xla_does(size, monkeypatch):
    if not ordering.available(size):
        pytest.skip("blocks of this GPU form no clusters")
    rng = np.random.default_rng(size)
    for bound in (200, 1 << 16, 1_900_000, 1 << 32):
        keys = rng.integers(0, bound, size, dtype=np.uint32)
        for values in (None, rng.integers(0, 1 << 30, size).astype(np.int32)):
            given = [keys] if values is None else [keys, values]
            function = jax.jit(lambda key, *values, bound=bound: sorting_traced.sort_pairs(key, bound, *values))
            assert "dejax_kernel" in function.lower(*given).as_text()
            for _ in range(3):
                found = function(*given)
                order = np.argsort(keys, kind="stable")
                np.testing.assert_array_equal(found[0], keys[order])
                np.testing.assert_array_equal(found[1], order if values is None else values[order])
    x = jnp.asarray(rng.integers(0, 100, (3, size)), jnp.int32)
    for function in (sorting_traced.cumulative_sum, jax.vmap(sorting_traced.cumulative_sum)):
        np.testing.assert_array_equal(jax.jit(function)(x), np.cumsum(x, axis=1))


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "found"), [*CASES, ((700_000, 9_000, 60_000, 1_100_000), 150_000)])
def test_a_gpu_numbers_as_by_a_sort(counts, found):
    if not ordering.available(found):
        pytest.skip("blocks of this GPU form no clusters")
    for seed in range(3):
        old, new, places = nodes_of_types(seed, counts, found)

        def run(a, b, types, more, how, places=places):
            after, *rest = how(Nodes(a, types), Nodes(b, more), places)
            return after.nodes, *rest

        known, more = old[1], new[1]
        one, many = (
            jax.jit(functools.partial(lambda a, b, how: run(a, b, known, more, how), how=how))  # noqa: B023
            for how in (_numbering.number_found, _numbering.by_sort)
        )
        assert "dejax_number" in one.lower(old[0], new[0]).as_text()
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, one(old[0], new[0]), many(old[0], new[0]))
