"""Processes that die, hang, raise or disagree: the others end with a message; a restart gives the same losses."""

import re
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dejax import distributed
from dejax.distributed import ShardedTable, failing, make_mesh
from dejax.host_gather import DeviceTable, HostTable
from tests.distributed import job, processes
from tests.test_files import small_drive

PROGRAM = """
import json, os, signal, sys
process, count, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[5])["how"]
from dejax import distributed
distributed.initialize(f"127.0.0.1:{port}", count, process, timeout=6)
import jax
victim = process == count - 1
try:
    distributed.check_agreement(nodes=5 + victim)
except distributed.DisagreementError as error:
    print(error, flush=True)
distributed.check_agreement(nodes=5)
mesh = distributed.make_mesh()
psum = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.sharding.PartitionSpec(),
                     out_specs=jax.sharding.PartitionSpec(), check_vma=False)
for step in range(40 if how != "ends" else 3):
    jax.block_until_ready(jax.jit(psum)(1.0))
    if step == 2 and victim and how == "raises":
        raise KeyError("a bug of the user")
    if step == 2 and victim and how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, how))
print("all steps done", flush=True)
"""


def statuses(tmp_path, how, count=2):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = processes.start(count, tmp_path, program=program, how=how)
    try:
        found = []
        for process in started:
            try:
                found.append(process.wait(60 if not found or how != "SIGSTOP" else 1))
            except subprocess.TimeoutExpired:
                found.append(None)
        return found, [processes.output(tmp_path, k) for k in range(count)]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "how, message",
    [
        ("SIGKILL", "process 1 on .*: no sign of life"),
        pytest.param("SIGSTOP", "process 1 on .*: no sign of life", marks=pytest.mark.slow),
        ("raises", "process 1 ended: KeyError: 'a bug of the user'"),
    ],
)
def test_the_others_end_with_a_message(how, message, tmp_path) -> None:
    """They disagreed before, which all were told."""
    found, texts = statuses(tmp_path, how)
    assert found[0] == failing.EXIT_STATUS, texts[0][-2000:]
    (line,) = [line for line in texts[0].splitlines() if line.startswith("dejax.distributed:")]
    assert re.search(message, line), line
    assert found[1] == {"SIGKILL": -9, "SIGSTOP": None, "raises": 1}[how]
    want = "all processes must have the same `nodes`, got 5 on process 0, 6 on process 1"
    assert all(want in text for text in texts), texts


@pytest.mark.slow
def test_processes_that_end_say_nothing(tmp_path) -> None:
    found, texts = statuses(tmp_path, "ends")
    assert found == [0, 0] and not any("dejax.distributed:" in text for text in texts), texts


ENDS_WHILE_IT_BEATS = """
import sys, jax
from dejax import distributed
from dejax.distributed import failing
process, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
failing.watch(20.0, interval=1e-5)  # a thread is nearly always within a call of jax's C++ code
jax.block_until_ready(jax.numpy.ones(3))
"""


@pytest.mark.slow
def test_threads_of_the_watch_end_before_python_does(tmp_path) -> None:
    """Five of six processes were aborted at their end while the threads ran on."""
    program = tmp_path / "program.py"
    program.write_text(ENDS_WHILE_IT_BEATS)
    for _ in range(3):
        processes.finish(processes.start(2, tmp_path, program=program), tmp_path)


@pytest.mark.slow
def test_killed_at_random_times_a_job_has_the_losses_of_one_that_ran_through(tmp_path) -> None:
    check_kills(tmp_path, 5)


@pytest.mark.slow
def test_killed_fifty_times(tmp_path) -> None:
    check_kills(tmp_path, 50)


def check_kills(tmp_path, times):
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    found, took = processes.kill_and_restart(tmp_path / "killed", times, seed=times)
    assert len(took) == times and max(took) < 30
    cache = tmp_path / "killed" / "cache"
    whole = processes.start(2, tmp_path / "whole", cache=cache, steps=len(found), tables="plain", every=10**9)
    processes.finish(whole, tmp_path / "whole", timeout=900)
    assert processes.losses(tmp_path / "whole") == found


def test_a_full_drive_leaves_the_checkpoints_before(tmp_path) -> None:
    distributed.save(tmp_path, 1, {"w": jnp.ones(3)})
    large = {"w": np.random.default_rng(0).integers(0, 1 << 30, 100_000)}
    with small_drive(), pytest.raises(OSError, match=f"checkpoints before are whole; make room .*{tmp_path}"):
        distributed.save(tmp_path, 2, large)
    state, number = distributed.restore(tmp_path, {"w": jnp.zeros(3)})
    assert number == 1 and (state["w"] == 1).all()
    distributed.save(tmp_path, 2, large)
    assert distributed.latest_step(tmp_path) == 2


def test_errors_of_checkpoints(tmp_path) -> None:
    assert distributed.latest_step(tmp_path / "none") is None
    with pytest.raises(FileNotFoundError, match="must have a checkpoint"):
        distributed.restore(tmp_path / "none", {"w": jnp.zeros(3)})
    distributed.save(tmp_path, 1, {"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match="got a difference in 'v'"):
        distributed.restore(tmp_path, {"w": jnp.zeros(3), "v": jnp.zeros(3)})
    with pytest.raises(ValueError, match="a checkpoint: integers must fit int32 without jax's 64-bit mode"):
        distributed.save(tmp_path, 2, {"seen": np.int64(2**40)})  # as 0, jax would give it back
    with pytest.raises(ValueError, match="must have the shapes of the checkpoint"):
        distributed.restore(tmp_path, {"w": jnp.zeros(4)})
    with pytest.raises(ValueError, match="must have the dtypes of the checkpoint, float32 for 'w', got bfloat16"):
        distributed.restore(tmp_path, {"w": jnp.zeros(3, jnp.bfloat16)})
    for step in (2, 3, 4):
        distributed.save(tmp_path, step, {"w": jnp.full(3, step)}, keep=2)
    assert distributed.latest_step(tmp_path) == 4
    state, step = distributed.restore(tmp_path, {"w": jnp.zeros(3, jnp.int32)}, step=3)
    assert step == 3 and state["w"].tolist() == [3, 3, 3]
    with pytest.raises(FileNotFoundError, match="must have a checkpoint of step 1"):
        distributed.restore(tmp_path, {"w": jnp.zeros(3)}, step=1)


@pytest.mark.parametrize(
    "make", [HostTable.from_numpy, DeviceTable.from_numpy, lambda x: ShardedTable.from_numpy(x, make_mesh(1))]
)
def test_tables_are_restored_in_their_own_dtype(make, tmp_path) -> None:
    rows = np.arange(8).reshape(4, 2) + 0.5
    distributed.save(tmp_path, 1, {"t": make(rows.astype(np.float16))})
    found, _ = distributed.restore(tmp_path, {"t": make(np.zeros((4, 2), np.float16))})
    np.testing.assert_array_equal(found["t"].numpy(), rows)
    with pytest.raises(ValueError, match="the dtypes of the checkpoint, float16 for .*'t'.*, got bfloat16"):
        distributed.restore(tmp_path, {"t": make(np.zeros((4, 2), ml_dtypes.bfloat16))})


def test_facts_of_one_process() -> None:
    facts = distributed.check_agreement(nodes=3, graph=job.graph(), key=jax.random.key(0))
    assert facts["nodes"] == "3" and facts["jax"] == jax.__version__
    assert facts["graph"] == failing.fact_text(job.graph()) != failing.fact_text(np.arange(3))
    table = np.arange(6.0).reshape(2, 3)
    assert failing.fact_text(HostTable.from_numpy(table)) != failing.fact_text(HostTable.from_numpy(table + 1))
    assert failing._difference("n", {0: "a", 1: "a"}) == ""
    assert failing._difference("n", {0: "a", 1: "b", 2: "b"}) == "`n`, got a on process 0, b on processes 1, 2"
    with pytest.raises(RuntimeError, match="must be initialized"):
        distributed.watch()
    with pytest.raises(ValueError, match="`timeout` must be above `interval`"):
        distributed.watch(1, interval=2)
