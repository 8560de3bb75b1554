"""The folder of a run: its settings, checkpoints by Orbax, and what a resume refuses."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.training import Checkpoints
from dejax.training.checkpoint import claimed, find_run, read_settings
from tests.test_files import small_drive

STATE = {"w": jnp.arange(3.0), "steps": (jnp.int32(4), None), "table": np.arange(6.0).reshape(3, 2)}

CLAIMING = """
import sys
from pathlib import Path
from dejax.training.checkpoint import claimed
with claimed(Path(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path):
    found = Checkpoints(tmp_path / "run", free=("epochs",))
    found.begin({"epochs": 2, "fan_outs": (3, 2), "lr": 0.1}, resume=False)
    return found


def test_a_state_comes_back_of_the_same_kinds_and_replaces_the_one_before(run):
    run.save(1, 3, jax.tree.map(lambda x: x + 1, STATE), [0.5])
    run.save(1, 7, STATE, {"loss": [0.5, 0.25]})
    state, history = run.restore(1, STATE)
    jax.tree.map(np.testing.assert_array_equal, state, STATE)
    assert isinstance(state["w"], jax.Array) and isinstance(state["table"], np.ndarray)
    assert history == {"loss": [0.5, 0.25]} and run.latest(1) == 7 and run.seeds() == [1]
    assert [path.name for path in (run.folder / "checkpoints" / "seed1").iterdir()] == ["7"]
    with pytest.raises(FileNotFoundError, match=r"the seed must have a checkpoint in .*, got 0; seeds there: \[1\]"):
        run.restore(0, STATE)


def test_a_resume_may_change_the_length_alone(run):
    assert read_settings(run.folder) == {"epochs": 2, "fan_outs": [3, 2], "lr": 0.1}
    run.save(0, 1, STATE, [])
    run.begin({"epochs": 9, "fan_outs": (3, 2), "lr": 0.1}, resume=True)
    with pytest.raises(ValueError, match=r"got lr=0.5 \(it has 0.1\); give the same ones"):
        run.begin({"epochs": 9, "fan_outs": (3, 2), "lr": 0.5}, resume=True)
    assert run.latest(0) == 1  # the earlier run is still there
    with pytest.raises(FileNotFoundError, match="must be the folder of a run"):
        Checkpoints(run.folder / "other").begin({}, resume=True)


def test_a_run_without_resume_removes_its_own_earlier_checkpoints_alone(run, tmp_path):
    run.save(0, 1, STATE, [])
    run.begin({"epochs": 2}, resume=False)
    assert run.seeds() == []
    (tmp_path / "theirs" / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(ValueError, match="--out must be a new folder or that of a run"):
        Checkpoints(tmp_path / "theirs").begin({}, resume=False)
    assert (tmp_path / "theirs" / "checkpoints" / "4").exists()


def test_two_processes_do_not_train_into_one_folder(tmp_path):
    folder = tmp_path / "run"
    words = [sys.executable, "-c", CLAIMING, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "claimed\n"
        with (
            pytest.raises(ValueError, match=r"into which no other process trains, got .*; name another --out"),
            claimed(folder),
        ):
            pass
        other.communicate("end\n")
    assert not folder.exists()  # nothing was written
    folder.mkdir()
    with claimed(folder):
        pass
    assert folder.exists()


def test_find_run(run):
    run.save(0, 20, STATE, [])
    assert find_run(run.folder) == (run.folder, None)
    assert find_run(run.folder / "checkpoints" / "seed0") == (run.folder, 0)
    assert find_run(run.folder / "checkpoints" / "seed0" / "20") == (run.folder, 0)
    with pytest.raises(FileNotFoundError, match="must be the folder that --out gave"):
        find_run(run.folder.parent / "else")


def test_a_state_is_written_again_after_a_run_that_ended_in_between(tmp_path):
    """The best state is written before the last one: a resumed run comes to it again."""
    run = Checkpoints(tmp_path)
    run.begin({}, resume=False)
    for best in (True, False):
        for value in (1.0, 2.0):
            run.save(0, 20, {"w": jnp.full(2, value)}, [value], best=best)
        state, history = run.restore(0, {"w": jnp.zeros(2)}, best=best)
        assert history == [2.0] and float(state["w"][0]) == 2.0


@pytest.mark.parametrize("number", [20, 21])
def test_a_full_drive_leaves_the_checkpoint_before(tmp_path, number):
    """Also where the new checkpoint has the number of the one before."""
    run = Checkpoints(tmp_path)
    run.begin({}, resume=False)
    run.save(0, 20, {"w": jnp.ones(2)}, [1.0])
    large = {"w": np.random.default_rng(0).integers(0, 1 << 30, 100_000)}
    for _ in range(2):
        with (
            small_drive(),
            pytest.raises(OSError, match="checkpoint before is whole; make room .*checkpoints/seed0"),
        ):
            run.save(0, number, large, [2.0])
        assert run.latest(0) == 20 and run.seeds() == [0]
        state, history = run.restore(0, {"w": jnp.zeros(2)})
        assert history == [1.0] and float(state["w"][0]) == 1.0
    run.save(0, number, large, [2.0])
    state, history = run.restore(0, {"w": np.zeros(100_000, np.int64)})
    assert history == [2.0] and run.latest(0) == number
    np.testing.assert_array_equal(state["w"], large["w"])
    assert [path.name for path in (tmp_path / "checkpoints" / "seed0").iterdir()] == [str(number)]


def test_leaves_of_one_path_are_an_error(run):
    with pytest.raises(ValueError, match="leaves of a state must have different paths, got 'a.b' twice"):
        run.save(0, 1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(2)}, [])
