"""Jobs of several processes on this machine's loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("job.py")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(processes, folder, devices=1, program=JOB, **settings):
    """Starts the processes of a job; their output goes to files in `folder`."""
    port, flags = free_port(), "--xla_backend_optimization_level=0"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(JOB.parents[2]), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    started = []
    for process in range(processes):
        out = open(Path(folder) / f"out-{process}.txt", "w")
        arguments = [str(process), str(processes), str(port), str(folder), json.dumps(settings)]
        command = [sys.executable, str(program), *arguments]
        started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    return started


def output(folder, process):
    return (Path(folder) / f"out-{process}.txt").read_text()


def losses(folder, process=0):
    """{step: loss}; a step that was done again must have the same loss."""
    found = {}
    for line in (Path(folder) / f"losses-{process}.jsonl").read_text().splitlines():
        step, loss = json.loads(line)
        assert found.setdefault(step, loss) == loss, f"step {step}: {loss} instead of {found[step]}"
    return found


def finish(started, folder, timeout=240):
    try:
        statuses = [process.wait(timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    assert statuses == [0] * len(started), "\n".join(output(folder, k)[-2000:] for k in range(len(started)))
