"""The disk tier of each engine: its cap, its reported size, and the tensors that come back."""

import itertools
import os

import jax
import numpy as np
import pytest

from dejax.offload import ActivationStore
from tests.offload.held import eventually
from tests.offload.processes import python
from tests.offload.tensors import KIB, MIB, on_disk, tensors_of

ENGINES = ["tensorstore", "direct"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunk_bytes", [64 * KIB, pytest.param(8 * MIB, marks=pytest.mark.slow)])
def test_the_cap_is_of_what_the_files_hold(engine, chunk_bytes, tmp_path):
    sizes = [3 * MIB + 5, 700 * KIB, 4096, 1, 2 * MIB] * 4
    cap = 17 * MIB
    held = []
    with ActivationStore(
        tmp_path, host_bytes=10 * MIB, disk_bytes=cap, engine=engine, chunk_bytes=chunk_bytes, io_threads=2
    ) as store:
        tensors = tensors_of(*sizes)
        for _ in range(3):
            handles = jax.block_until_ready(tensors.put(tensors.xs))
            store.drain()
            held.append((on_disk(tmp_path), store.stats().disk_bytes))
            tensors.check(handles)
            held.append((on_disk(tmp_path), store.stats().disk_bytes))
        assert store.stats().read_bytes > 0
        store.drain()
        assert store.stats().disk_bytes == 0 and on_disk(tmp_path) == 0
    # A file system keeps a block of its own for a file in many pieces.
    assert all(real <= told + 16 * 4096 and told <= cap for real, told in held), held
    assert max(told for _, told in held) >= 8 * MIB


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cap", [4095, MIB, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4096, 100 * KIB))])
def test_a_cap_that_is_too_small(engine, cap, tmp_path):
    with ActivationStore(
        tmp_path, host_bytes=MIB, disk_bytes=cap, engine=engine, chunk_bytes=64 * KIB, io_threads=2
    ) as store:
        with pytest.raises(Exception, match=f"disk tier is full: disk_bytes={cap}"):
            tensors_of(*[300 * KIB] * 12).run()
        assert eventually(lambda: store.stats().live_count == 0)  # the step's other calls may still be running
        stats = store.stats()
        assert on_disk(tmp_path) <= stats.disk_bytes <= cap and stats.live_count == 0
        tensors_of(*[100 * KIB] * 3).run()  # what fits into memory still does


@pytest.mark.parametrize("engine", ENGINES)
def test_no_disk_and_no_host_memory(engine, tmp_path):
    with ActivationStore(tmp_path, host_bytes=MIB, disk_bytes=0, engine=engine) as store:
        assert not list(tmp_path.iterdir())  # 0 is no disk tier
        tensors_of(*[MIB]).run()
        with pytest.raises(Exception, match="host tier is full"):
            tensors_of(*[MIB] * 3).run()
        assert store.stats().disk_bytes == 0
    with ActivationStore(tmp_path, host_bytes=0, engine=engine) as store:
        with pytest.raises(Exception, match="larger than host_bytes=0; raise host_bytes, through which"):
            tensors_of(*[4096]).run()
        assert store.stats().live_count == 0
    with ActivationStore(tmp_path, host_bytes=MIB, disk_bytes=None, engine=engine) as store:
        tensors_of(*[MIB] * 20).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ENGINES)
def test_sizes_of_all_kinds(engine, tmp_path):
    sizes = [0, 1, 4095, 4096, 4097, 0, 65535, 65537, 300 * KIB + 1, 8 * KIB]
    with ActivationStore(tmp_path, host_bytes=320 * KIB, engine=engine, chunk_bytes=64 * KIB) as store:
        tensors = tensors_of(*sizes)
        for _ in range(4):
            tensors.run()
        assert store.stats().live_bytes == 0  # XLA may leave out what has no elements


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_other_sizes_take_the_room_of_earlier_ones(engine, tmp_path):
    """The cap holds one set of tensors at a time: files of the former sizes go."""
    rng = np.random.default_rng(0)
    with ActivationStore(tmp_path, host_bytes=MIB, disk_bytes=4 * MIB, engine=engine, chunk_bytes=256 * KIB) as store:
        for _ in range(3):
            size = int(rng.integers(10, 250)) * KIB
            tensors_of(*[size] * (3 * MIB // size)).run()
            assert on_disk(tmp_path) <= store.stats().disk_bytes <= 4 * MIB


def test_a_tight_budget_of_several_sizes():
    """What fits exactly fits in every order, step after step."""
    for sizes in itertools.islice(itertools.permutations([16 * KIB, 20 * KIB, 4 * KIB]), 0, 6, 2):
        with ActivationStore(host_bytes=40 * KIB):
            tensors = tensors_of(*sizes)
            for _ in range(3):
                tensors.run()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tensorstore", "direct"])
def test_random_sizes_and_caps(engine, tmp_path):
    """Right, or an exception that names a cap; and never more than the caps."""
    rng = np.random.default_rng(1)
    for _ in range(4):
        host, disk = (int(n) * KIB for n in rng.integers([300, 1], [1500, 3000]))
        chunk = 4096 * int(rng.integers(1, 40))
        with ActivationStore(
            tmp_path, host_bytes=host, disk_bytes=disk, engine=engine, chunk_bytes=chunk, io_threads=3
        ) as store:
            tensors = tensors_of(*(int(n) for n in rng.integers(0, 290 * KIB, size=12)))
            try:
                tensors.run()
                tensors.run()
            except AssertionError:
                raise
            except Exception as error:
                assert f"host_bytes={host}" in str(error), error
            stats = store.stats()
            assert stats.peak_host_bytes <= host and stats.disk_bytes <= disk
            assert on_disk(tmp_path) <= stats.disk_bytes + 16 * 4096
            store.clear()
    assert not list(tmp_path.iterdir())


FULL = """
import resource, sys
import jax
from dejax.offload import ActivationStore
from tests.offload.tensors import MIB, Tensors
engine, path, limit = sys.argv[1:]
tensors = Tensors([MIB] * 12)
with ActivationStore(path, host_bytes=4 * MIB, engine=engine, chunk_bytes=MIB, io_threads=2) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))  # writing beyond fails, as on a full disk
    for _ in range(3):
        try:
            tensors.run()
            print("DONE")
        except Exception as error:
            print("WENT WRONG", error)
    print("live", store.stats().live_count)
"""


@pytest.mark.parametrize("engine", ["direct", pytest.param("tensorstore", marks=pytest.mark.slow)])
def test_a_full_file_system(engine, tmp_path):
    ran = python(FULL, engine, str(tmp_path), "4096")
    assert ran.stdout.count("WENT WRONG") == 3 and "live 0" in ran.stdout, ran.stdout + ran.stderr
    assert "disk tier failed" in ran.stdout and "File too large" in ran.stdout, ran.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or os.getuid() != 0, reason="needs a small file system of its own"
)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_space_left(engine, tmp_path):
    if os.system(f"mount -t tmpfs -o size=3m tmpfs {tmp_path} 2> {os.devnull}") != 0:
        pytest.skip("cannot mount")
    try:
        with ActivationStore(tmp_path, host_bytes=4 * MIB, engine=engine, chunk_bytes=MIB, io_threads=2) as store:
            for _ in range(2):
                with pytest.raises(Exception, match="disk tier failed.*No space left"):
                    tensors_of(*[MIB] * 12).run()
                assert store.stats().live_count == 0
            tensors_of(*[MIB] * 3).run()
        assert not list(tmp_path.iterdir())
    finally:
        assert os.system(f"umount {tmp_path}") == 0
