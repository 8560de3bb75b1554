"""A process that dies in a step while activations are offloaded: the others end by name, the next start cleans up."""

import os
import re
from pathlib import Path

import pytest

from dejax.distributed import failing
from dejax.offload.activations import memory
from tests.distributed import processes

PROGRAM = """
import json, os, signal, sys
process, count, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
victim, when = json.loads(sys.argv[5]).values()
from dejax import distributed
distributed.initialize(f"127.0.0.1:{port}", count, process, timeout=6)
import jax, jax.numpy as jnp, numpy as np
from dejax.offload import ActivationStore, offload
P = jax.sharding.PartitionSpec
step_number = 0

def look(x):
    if process == victim and step_number == 2:
        (files,) = [place for place in os.listdir(folder + "/drive") if f"-{os.getpid()}-" in place]
        print("dies with", store.stats().host_bytes, "bytes and files in", files, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return x

def called(x):
    return jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

@jax.custom_vjp
def between(x):
    return called(x) if when == "forward" else x + 0
between.defvjp(lambda x: (between(x), None), lambda _, g: (called(g) if when == "backward" else g,))

def loss(ws, x):
    layer = offload(lambda w, x: x + jnp.tanh(x @ w) @ w.T, min_bytes=1)
    for number, w in enumerate(ws):
        x = layer(w, between(x) if number == 2 else x)
    return jax.lax.pmean((x ** 2).mean(), "data")

mesh = distributed.make_mesh()
step = jax.jit(jax.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                             check_vma=False))
rng = np.random.default_rng(0)
ws = [rng.normal(size=(32, 32)).astype(np.float32) / 6 for _ in range(4)]
x = rng.normal(size=(64 * count, 32)).astype(np.float32)
x = jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, P("data")), lambda at: x[at])
of_default_size = ActivationStore()
with ActivationStore(folder + "/drive", host_bytes=1 << 15, engine="direct", chunk_bytes=4096) as store:
    for step_number in range(4):
        value, gradients = jax.block_until_ready(step(ws, x))
    seen = store.stats()
    print("stored", seen.stored_bytes, "fetched", seen.fetched_bytes, "loss", float(value), flush=True)
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("all have their folders")
    print("folders", len(os.listdir(folder + "/drive")), flush=True)
    multihost_utils.sync_global_devices("all have counted them")
"""


def marks() -> set[int]:
    """Processes with a mark of a store of default size."""
    folder = memory._folder()
    return {int(path.name.split("-")[0]) for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "when"),
    [
        (1, "backward"),
        (1, "forward"),
        (0, "backward"),
    ],
)
def test_a_process_dies_in_a_step(victim: int, when: str, tmp_path: Path) -> None:
    program, drive = tmp_path / "program.py", tmp_path / "drive"
    program.write_text(PROGRAM)
    drive.mkdir()
    started = processes.start(2, tmp_path, program=program, victim=victim, when=when)
    ends = processes.statuses_of(started, 120)
    texts = [processes.output(tmp_path, number) for number in range(2)]
    assert ends[victim] == -9 and ends[1 - victim] == failing.EXIT_STATUS, texts
    assert re.search(r"dies with [1-9]\d* bytes and files in dejax-offload-", texts[victim]), texts[victim]
    (line,) = [line for line in texts[1 - victim].splitlines() if line.startswith("dejax.distributed:")]
    assert re.search(r"process 1 on .*: no sign of life" if victim else r"process 0 \(.*\), .*is gone", line), line
    left = [place.name for place in drive.iterdir()]
    assert any(f"-{started[victim].pid}-" in name for name in left), left  # it could not close its store

    cache = tmp_path / "cache"
    again = processes.start(2, tmp_path, program=program, cache=cache, victim=-1, when=when)
    processes.finish(again, tmp_path)
    texts = [processes.output(tmp_path, number) for number in range(2)]
    assert all("folders 2\n" in text for text in texts), texts  # those of the living
    stored = [re.search(r"stored (\d+) fetched (\d+) loss (\S+)", text) for text in texts]
    assert stored[0] and stored[1] and stored[0].groups() == stored[1].groups()
    assert stored[0][1] == stored[0][2] != "0"
    assert not list(drive.iterdir())
    assert not marks() & {process.pid for process in (*started, *again)} - {os.getpid()}


FAILED_READ = """
import json, sys
process, count, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
from dejax import distributed
distributed.initialize(f"127.0.0.1:{port}", count, process, timeout=6)
import jax, jax.numpy as jnp, numpy as np, optax
from dejax.offload import StateStore, optimizer
from tests.offload.state_faults import interceptor
P = jax.sharding.PartitionSpec
mesh = distributed.make_mesh()
place = lambda x: jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, P("data")), lambda at: x[at])
params = {"w": place(np.ones((64, 48), np.float32))}
with StateStore(folder + "/drive", chunk_bytes=4096) as store:
    tx = optimizer(optax.adam(1e-2), min_bytes=1, path=store)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(p["w"] ** 2))(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for number in range(6):
        if number == 2 and process == 1:
            interceptor(store).inject("read", 1)
        params, state, loss = jax.block_until_ready(step(params, state))
        print("step", number, float(loss), flush=True)
"""


def test_a_read_that_fails_in_one_process_ends_all(tmp_path: Path) -> None:
    """No process goes on with wrong numbers, and none waits for ever."""
    program = tmp_path / "program.py"
    program.write_text(FAILED_READ)
    (tmp_path / "drive").mkdir()
    started = processes.start(2, tmp_path, devices=2, program=program)
    ends = processes.statuses_of(started, 120)
    first, second = (processes.output(tmp_path, number) for number in range(2))
    assert ends == [failing.EXIT_STATUS, 1], (ends, first, second)
    assert re.search(r"a read failed: injected fault \(on one device of several", second), second
    assert re.search(r"process 0 of 2 ends: process 1 ended: .* a read failed: injected fault", first), first
    for text in (first, second):
        seen = dict(re.findall(r"step (\d) (\S+)", text))
        assert seen["1"] != "nan" and "4" not in seen, text
        assert all(seen[n] == "nan" for n in seen if n > "2"), text  # as soon as a lost value is read
