"""Jobs of several processes on this machine's loopback."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

JOB = Path(__file__).with_name("job.py")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(processes, folder, devices=1, program=JOB, cache=None, **settings):
    """Starts the processes of a job; their output goes to files in `folder`."""
    port, flags = free_port(), "--xla_backend_optimization_level=0"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(JOB.parents[2]), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        # A job that starts again, and the second process, compile nothing.
        "JAX_COMPILATION_CACHE_DIR": str(cache or Path(folder) / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    started = []
    for process in range(processes):
        arguments = [str(process), str(processes), str(port), str(folder), json.dumps(settings)]
        command = [sys.executable, str(program), *arguments]
        with open(Path(folder) / f"out-{process}.txt", "w") as out:
            started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    return started


def output(folder, process):
    return (Path(folder) / f"out-{process}.txt").read_text()


def losses(folder, process=0):
    """{step: loss}; a step that was done again must have the same loss."""
    found = {}
    for line in (Path(folder) / f"losses-{process}.jsonl").read_text().splitlines():
        try:
            step, loss = json.loads(line)
        except (ValueError, TypeError):  # cut off by a kill
            continue
        assert found.setdefault(step, loss) == loss, f"step {step}: {loss} instead of {found[step]}"
    return found


def statuses_of(started, timeout):
    """The exit statuses of processes; none runs on."""
    try:
        return [process.wait(timeout) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def finish(started, folder, timeout=240):
    statuses = statuses_of(started, timeout)
    assert statuses == [0] * len(started), "\n".join(output(folder, k)[-2000:] for k in range(len(started)))


def kill_and_restart(folder, times, seed, processes=2, timeout=8.0, ends_within=30.0):
    """Kills a process of a job at a random time, `times` times, each time starting the job again; then lets it end.

    A fourth of the kills comes before the first step of a start (reading, tracing, compiling), the others later: in
    steps and while checkpoints are written.

    Returns the losses by step, and seconds from each kill to the end of the other processes. A step that was done again
    must have had the same loss.
    """
    rng, took = random.Random(seed), []
    folder = Path(folder)
    settings = {"tables": "plain", "every": 3, "timeout": timeout, "pause": 0.05}
    for turn in range(times):
        started = start(processes, folder, steps=10**6, **settings)
        try:
            victim = rng.randrange(processes)
            before = lines(folder)
            wait_for(lambda: all("begins" in output(folder, k) for k in range(processes)), started)
            if turn % 4:
                wait_for(lambda before=before: lines(folder) > before, started)
            time.sleep(rng.uniform(0, 4 if turn % 4 else 1))
            assert [process.poll() for process in started] == [None] * processes, output(folder, 0)[-2000:]
            started[victim].kill()
            begin = time.monotonic()
            for k, process in enumerate(started):
                status = process.wait(max(0.1, ends_within - (time.monotonic() - begin)))
                if k != victim:
                    last = [x for x in output(folder, k).splitlines() if x.startswith("dejax.distributed:")]
                    assert status == 75 and f"process {victim}" in last[-1], output(folder, k)[-3000:]
            took.append(time.monotonic() - begin)
        finally:
            for process in started:
                process.kill()
                process.wait()
        done = lines(folder)
        print(
            f"kill {turn}: process {victim}, {done} steps so far, the others ended after {took[-1]:.1f} s", flush=True
        )
    done = max(
        [int(place.name) for place in (folder / "checkpoints").glob("[0-9]*") if place.name.isdigit()], default=0
    )
    finish(start(processes, folder, steps=done + 5, **settings), folder)
    found = losses(folder, 0)
    assert sorted(found) == list(range(len(found)))
    return found, took


def lines(folder):
    path = Path(folder) / "losses-0.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition, started, timeout=240):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end and all(process.poll() is None for process in started)
        time.sleep(0.05)
