"""Folders of the disk tier and their owners: processes that claim at once, are killed, or fork."""

import os
import signal

import pytest

from dejax.offload import _files
from tests.offload.processes import popen


def test_another_process_cleans_up_during_a_claim(tmp_path, monkeypatch):
    """Another process cleans up at each moment of a claim; the resulting folder is complete."""
    flock, mkdtemp = _files.fcntl.flock, _files.tempfile.mkdtemp
    moments = []

    def cleaning(call, moment):
        def wrapped(*args, **kwargs):
            before = call(*args, **kwargs) if moment == "made" else None
            if moments.count(moment) < 3:
                moments.append(moment)
                with monkeypatch.context() as patch:
                    patch.setattr(_files.fcntl, "flock", flock)
                    _files.remove_abandoned(tmp_path)
            return before if moment == "made" else call(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(_files.tempfile, "mkdtemp", cleaning(mkdtemp, "made"))
    monkeypatch.setattr(_files.fcntl, "flock", cleaning(flock, "opened"))
    claim = _files.claim(tmp_path)
    assert moments.count("made") == 3 and moments.count("opened") == 3
    monkeypatch.undo()
    assert _files.remove_abandoned(tmp_path) == []
    assert [path.name for path in claim.folder.iterdir()] == ["owner"]
    assert list(tmp_path.iterdir()) == [claim.folder]
    claim.release()
    assert not list(tmp_path.iterdir())


CLAIMS = """
import importlib.util, os, random, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("_files", sys.argv[3])  # without jax, which takes seconds to import
sys.modules["_files"] = _files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_files)
path, seconds = Path(sys.argv[1]), float(sys.argv[2])
rng = random.Random(os.getpid())
end = time.monotonic() + seconds
count = 0
while time.monotonic() < end:
    claim = _files.claim(path)
    (claim.folder / "data").write_text("x")
    assert (claim.folder / "owner").exists()
    if rng.random() < 0.1:
        time.sleep(0.001)
    assert (claim.folder / "data").exists(), "another process took a living store's folder"
    claim.release()
    assert not claim.folder.exists()
    count += 1
print(count)
"""


@pytest.mark.slow
def test_processes_that_claim_at_once(tmp_path):
    processes = [popen(CLAIMS, str(tmp_path), "2", _files.__file__) for _ in range(4)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert int(out) > 10
    assert not list(tmp_path.iterdir())


def killed_before_call(number, path):
    """Forks a child that claims and releases a folder, and is killed before the given system call."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        claim = _files.claim(path)
        for name in ("chunks0", "chunks1", "array4096/0.0", "array4096/1.0", "array8192/0.0"):
            (claim.folder / name).parent.mkdir(exist_ok=True)
            (claim.folder / name).write_text("data")
        calls = 0

        def counted(call):
            def wrapped(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapped

        for name in ("unlink", "rmdir", "close", "listdir", "scandir", "open"):
            setattr(os, name, counted(getattr(os, name)))
        claim.release()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_process_killed_at_each_point_of_a_release(tmp_path):
    number = 0
    while (ended := killed_before_call(number := number + 1, tmp_path)) == -signal.SIGKILL:
        _files.claim(tmp_path).release()
        assert not list(tmp_path.iterdir()), f"killed before call {number}"
    assert ended == 0 and number > 10 and not list(tmp_path.iterdir())


def test_other_folders_stay(tmp_path):
    (tmp_path / "dejax-offload-notes").write_text("a file")
    (tmp_path / "dejax-offload-1-mine").mkdir()
    (tmp_path / "dejax-offload-1-mine" / "data").write_text("no owner file: nobody's to remove")
    (tmp_path / "other").mkdir()
    _files.claim(tmp_path).release()
    assert len(list(tmp_path.iterdir())) == 3


PARENT = """
import os, sys, time, warnings
from dejax.offload import ActivationStore
warnings.simplefilter("ignore")
store = ActivationStore(sys.argv[1], host_bytes=1 << 20)
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)  # after what Python does in a forked child, which gives the folder's lock back
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_child_that_outlives_its_parent_holds_no_folder(tmp_path):
    parent = popen(PARENT, str(tmp_path))
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait(timeout=30)
        assert len(list(tmp_path.iterdir())) == 1
        _files.claim(tmp_path).release()
        assert not list(tmp_path.iterdir())
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()
