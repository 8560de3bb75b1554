"""How stores begin and end: threads, descriptors, forks, kills, and paths that are removed."""

import copy
import gc
import os
import pickle
import re
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest

from dejax.offload import ActivationStore, StateStore, _files, _resources, default_store
from dejax.offload.activations import store as _store
from tests.offload.held import assert_given_back, eventually, held
from tests.offload.processes import popen, python
from tests.offload.tensors import MIB, tensors_of

ENGINES = ["tensorstore", "direct"]
ONE_ENGINE = ["direct", pytest.param("tensorstore", marks=pytest.mark.slow)]


KILLED_AT = """
import os, signal, sys
from dejax.offload import ActivationStore
from dejax.offload import _files
from tests.offload.tensors import MIB, Tensors
path, engine, point = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = ActivationStore(path, host_bytes=2 * MIB, engine=engine, chunk_bytes=MIB, io_threads=1)
with store:
    Tensors([MIB] * 5).run()
    calls = 0
    def before(call):
        def wrapped(*args, **kwargs):
            global calls
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapped
    for module, names in ((os, ("unlink", "rmdir", "close", "listdir", "scandir")), (_files.Path, ("unlink", "rmdir"))):
        for name in names:
            setattr(module, name, before(getattr(module, name)))
print("closed after", calls)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tensorstore", "direct"])
def test_killed_at_each_point_of_close(engine, tmp_path):
    """The next store on the path removes all files that the killed process left."""
    ran = python(KILLED_AT, str(tmp_path), engine, "0")
    calls = int(re.search(r"closed after (\d+)", ran.stdout)[1])
    assert calls > 5 and not list(tmp_path.iterdir())
    for point in sorted({1, 2, calls // 2, calls - 3, calls - 2, calls - 1, calls}):
        ran = python(KILLED_AT, str(tmp_path), engine, str(point))
        assert ran.returncode == -signal.SIGKILL, ran.stderr
        _files.claim(tmp_path).release()
        assert not list(tmp_path.iterdir()), f"killed before call {point} of {calls}"


# Stores that are not closed


@pytest.mark.parametrize("engine", ONE_ENGINE)
def test_stores_that_are_dropped(engine, tmp_path):
    for _ in range(3):
        ActivationStore(tmp_path, host_bytes=1 << 20, engine=engine)
    gc.collect()
    before = held()
    for _ in range(30):
        ActivationStore(tmp_path, host_bytes=1 << 20, engine=engine)
        assert not list(tmp_path.iterdir())
    assert_given_back(before, 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "leak",
    ["descriptors", *(pytest.param(x, marks=pytest.mark.slow) for x in ("Python threads", "threads, in proportion"))],
)
def test_what_a_store_leaves_is_seen(leak):
    """The comparison above sees one thread or one descriptor of one store, and any thread of each tenth store."""
    before, end = held(), threading.Event()
    names = ["dejax-offload-0"] if leak == "Python threads" else ["a stranger"] * 10 if leak[0] == "t" else []
    threads = [threading.Thread(target=end.wait, name=name) for name in names]
    opened = os.open(os.devnull, os.O_RDONLY) if leak == "descriptors" else None
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(AssertionError, match=f"100 stores left .*{leak}"):
            assert_given_back(before, 100, patience=0.1)
    finally:
        end.set()
        if opened is not None:
            os.close(opened)
    for thread in threads:
        thread.join()
    assert_given_back(before, 100)


def test_native_threads_have_names(tmp_path):
    before = held().native_threads
    with ActivationStore(tmp_path, host_bytes=1 << 20, engine="direct", io_threads=3):
        assert eventually(lambda: held().native_threads == before + 3)


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, 1000])
@pytest.mark.parametrize("engine", ["tensorstore", "direct"])
def test_many_stores(engine, count, tmp_path):
    """A third is closed, a third dropped in a cycle that the garbage collector finds, a third just dropped."""
    for _ in range(3):
        ActivationStore(tmp_path, host_bytes=1 << 20, engine=engine, io_threads=1)
    gc.collect()
    before = held()
    stores = len(_resources._open)
    for i in range(count):
        store = ActivationStore(tmp_path if i % 2 else None, host_bytes=1 << 20, engine=engine, io_threads=1)
        if i % 3 == 0:
            store.close()
        elif i % 3 == 1:
            store.me = store
            if i % 30 == 1:
                gc.collect()
    del store
    assert_given_back(before, count)
    # The garbage collector may have run in one of a store's own threads, which closes it in another thread.
    assert eventually(lambda: len(_resources._open) <= stores and not list(tmp_path.iterdir()))


def test_a_store_that_an_engines_thread_drops(tmp_path):
    """The garbage collector may drop a store in one of its own I/O threads, which cannot wait for itself."""
    store = ActivationStore(tmp_path, host_bytes=1 << 20, engine="tensorstore", io_threads=2)
    parts = store._resources
    is_worker = parts.io.is_worker
    parts.io.is_worker = lambda: True
    del store
    parts.io.is_worker = is_worker
    assert eventually(lambda: not list(tmp_path.iterdir())) and not parts.is_open


def test_inside_with_a_store_stays(tmp_path):
    before = list(_store._entered)
    ActivationStore(tmp_path, host_bytes=1 << 20).__enter__()
    gc.collect()
    (entered,) = (store for store in _store._entered if store not in before)
    assert entered.is_open and len(list(tmp_path.iterdir())) == 1
    entered.__exit__(None, None, None)
    del entered
    assert _store._entered == before and not list(tmp_path.iterdir())


LEFT_OPEN = """
import sys
from dejax.offload import ActivationStore
stores = [ActivationStore(sys.argv[1], host_bytes=1 << 20, engine=engine) for engine in ("tensorstore", "direct")]
stores[0].__enter__()
if sys.argv[2] == "error":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("way", ["error", pytest.param("end", marks=pytest.mark.slow)])
def test_the_end_of_the_process_closes(way, tmp_path):
    ran = python(LEFT_OPEN, str(tmp_path), way)
    assert ran.returncode == (3 if way == "error" else 0) and not ran.stderr, ran.stderr
    assert not list(tmp_path.iterdir())


# Limits of the process


@pytest.mark.slow
@pytest.mark.parametrize("engine", ONE_ENGINE)
def test_threads_that_cannot_be_started(engine, tmp_path):
    """The error names the cause, the process goes on, and nothing is left."""
    code = """
import os, resource, sys
from dejax.offload import ActivationStore
from dejax.offload._resources import _open
from tests.offload.held import eventually
import jax, tensorstore
jax.devices()
ActivationStore(sys.argv[2], host_bytes=1 << 20, engine=sys.argv[1]).close()
now = int(open("/proc/self/statm").read().split()[0]) * 4096
before = len(os.listdir("/proc/self/task"))
resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20), now + (300 << 20)))  # threads have stacks of 8 MiB
try:
    ActivationStore(sys.argv[2], host_bytes=1 << 20, engine=sys.argv[1], io_threads=400)
except RuntimeError as error:
    print("ERROR", error)
none_left = eventually(lambda: len(os.listdir("/proc/self/task")) <= before)
print("none left:", none_left, "open", len(_open), os.listdir(sys.argv[2]))
ActivationStore(sys.argv[2], host_bytes=1 << 20, engine=sys.argv[1], io_threads=2).close()
"""
    ran = python(code, engine, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"ERROR.*I/O thread \d+ of 400 cannot be started.*io_threads", ran.stdout), ran.stdout + ran.stderr
    assert "none left: True open 0 []" in ran.stdout, ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("engine", ONE_ENGINE)
def test_too_many_open_files(engine, tmp_path):
    code = """
import os, resource, sys
from dejax.offload import ActivationStore
from tests.offload.tensors import MIB, Tensors
engine, path = sys.argv[1:]
tensors = Tensors([MIB] * 6)
options = dict(host_bytes=3 * MIB, engine=engine, chunk_bytes=MIB, io_threads=2)
ActivationStore(path, **options).close()
store = ActivationStore(path, **options)
tensors.put.lower(tensors.xs).compile()
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for free in (0, 1, 2, 5):
    while free > 0:
        os.close(taken.pop())
        free -= 1
    try:
        ActivationStore(path, **options).close()
    except (OSError, RuntimeError) as error:
        print("OPENING", error)
with store:
    try:
        tensors.run()
        print("RUN right")
    except Exception as error:
        print("RUN", error)
    assert store.stats().live_count == 0
for descriptor in taken:
    os.close(descriptor)
_ = ActivationStore(path, **options).close()
print("left", os.listdir(path))
"""
    hard = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n{code}"
    ran = python(hard, engine, str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "OPENING" in ran.stdout and "Too many open files" in ran.stdout and "RUN" in ran.stdout, ran.stdout
    assert "left []" in ran.stdout, ran.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_a_folder_that_turns_read_only(engine, tmp_path):
    if os.getuid() == 0:
        if os.system(f"mount -t tmpfs tmpfs {tmp_path} 2> {os.devnull}") != 0:
            pytest.skip("this user may write anywhere, and cannot mount")
        assert os.system(f"mount -o remount,ro {tmp_path}") == 0
    else:
        tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="cannot be written to"):
            ActivationStore(tmp_path, engine=engine)
    finally:
        assert os.getuid() != 0 or os.system(f"umount {tmp_path}") == 0


# Paths that are removed


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["path", "folder"])
def test_a_path_that_is_removed_under_the_store(engine, what, tmp_path):
    path = tmp_path / "path"
    path.mkdir()
    with ActivationStore(path, host_bytes=3 * MIB, engine=engine, chunk_bytes=MIB) as store:
        tensors = tensors_of(*[MIB] * 6)
        tensors.run()
        store.drain()
        shutil.rmtree(path if what == "path" else next(path.iterdir()))
        assert "disk" in store.summary() and store.stats().stored_count == 6
        try:
            tensors.run()
        except jax.errors.JaxRuntimeError as error:
            assert "offload" in str(error)
        store.clear()
    assert not store.is_open
    assert "disk" in store.summary()
    assert not path.exists() or not list(path.iterdir())


# Forks


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("kind", [ActivationStore, StateStore])
def test_a_store_stays_in_its_process(kind, copied, tmp_path):
    with (
        kind(tmp_path) as store,
        pytest.raises(TypeError, match=f"{kind.__name__}: a store must not be pickled .*another"),
    ):
        copied(store)
    assert not list(tmp_path.iterdir())


def in_a_fork(work):
    """Runs `work` in a forked child; returns (exit code, the text it returned)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)
            os.write(write, str(work()).encode())
            status = 0
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            _resources._close_all()  # as the interpreter's end does
            gc.collect()
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("engine", ["tensorstore", pytest.param("direct", marks=pytest.mark.slow)])
def test_a_forked_child_leaves_its_parents_store(engine, tmp_path):
    tensors = tensors_of(*[MIB] * 6)
    with ActivationStore(tmp_path, host_bytes=3 * MIB, engine=engine, chunk_bytes=MIB) as store:
        handles = jax.block_until_ready(tensors.put(tensors.xs))
        store.drain()
        (folder,) = tmp_path.iterdir()
        before = sorted(path.relative_to(folder) for path in folder.rglob("*"))

        def child():
            assert not store.is_open
            store.close()
            store.__exit__(None, None, None)
            for call in (store.stats, store.summary, store.clear, store.drain, store.check):
                with pytest.raises(RuntimeError, match="was made by process .* fork; make another"):
                    call()
            with pytest.raises(RuntimeError, match="closed; make another"):
                store.__enter__()
            with ActivationStore(tmp_path, host_bytes=MIB) as own:
                assert own.is_open
            assert default_store() is not None and default_store().is_open
            return "well"

        assert in_a_fork(child) == (0, "well")
        assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
        tensors.check(handles)
        # The child that lives on holds no lock: the folder of a parent that dies can be removed.
    assert not list(tmp_path.iterdir())


# Several stores and processes


@pytest.mark.parametrize("engine", ENGINES)
def test_several_stores_on_one_path(engine, tmp_path):
    tensors = tensors_of(*[MIB] * 6)
    options = {"host_bytes": 3 * MIB, "engine": engine, "chunk_bytes": MIB, "io_threads": 2}
    with ActivationStore([tmp_path, tmp_path], **options) as outer:
        held = jax.block_until_ready(tensors.put(tensors.xs))
        outer.drain()
        for _ in range(3):
            with ActivationStore(tmp_path, **options):
                assert len(list(tmp_path.iterdir())) == 3
                tensors.run()
        assert len(list(tmp_path.iterdir())) == 2
        tensors.check(held)
    assert not list(tmp_path.iterdir())


def test_threads_that_open_and_close(tmp_path):
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(6):
                store = ActivationStore(tmp_path, host_bytes=1 << 20, engine=rng.choice(ENGINES).item(), io_threads=2)
                if rng.random() < 0.5:
                    store.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not errors and not list(tmp_path.iterdir())


WORKER = """
import os, sys, time
import numpy as np
from dejax.offload import ActivationStore
from tests.offload.layers import interceptor
from tests.offload.tensors import KIB, MIB, Tensors
path, seed = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(seed)
steps = 0
while True:
    engine = str(rng.choice(ENGINES))
    options = dict(host_bytes=MIB, disk_bytes=8 * MIB, engine=engine, chunk_bytes=256 * KIB, io_threads=2)
    with ActivationStore(path, **options) as s:
        tensors, faults = Tensors([int(n) for n in rng.integers(0, 900 * KIB, size=6)]), interceptor(s)
        for _ in range(int(rng.integers(1, 20))):
            if rng.random() < 0.1:
                faults.inject(str(rng.choice(["write", "read", "corrupt", "store", "fetch"])), 1)
            try:
                tensors.run()
            except AssertionError:
                raise
            except Exception as error:
                assert "offload" in str(error), error
                s.clear()
            steps += 1
    print(steps, flush=True)
"""


@pytest.mark.slow
def test_processes_on_one_path_with_kills(tmp_path):
    """Four processes open, use and close stores with faults, and are killed. DEJAX_SOAK_SECONDS: for how long."""
    rng = np.random.default_rng(0)
    end = time.monotonic() + float(os.environ.get("DEJAX_SOAK_SECONDS", "40"))
    processes, seeds, kills, steps = [], iter(range(10**9)), 0, 0

    def finished(process):
        nonlocal steps
        out, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, err
        steps += int(out.split()[-1]) if out.split() else 0

    while time.monotonic() < end:
        while len(processes) < 4:
            processes.append(popen(WORKER, str(tmp_path), str(next(seeds))))
        time.sleep(float(rng.uniform(0, 8)))
        process = processes.pop(int(rng.integers(len(processes))))
        process.send_signal(signal.SIGKILL)
        finished(process)
        kills += 1
    for process in processes:
        process.send_signal(signal.SIGKILL)
        finished(process)
    assert steps > 0
    ActivationStore(tmp_path, host_bytes=1 << 20).close()
    assert not list(tmp_path.iterdir())
    print(f"{kills} kills, {steps} steps")
