"""Runs of `dejax-train` that are killed at any moment and resumed: the same numbers as of a run that never stopped."""

import json
import os
import subprocess
import sys

import pytest

from tests.training.graphs import community_graph

RUN = """
import json, os, random, signal, sys, time
import orbax.checkpoint  # what takes long is imported once: each run is a fork, made before jax is used
from dejax.training import trainer
from dejax.training.command import cli, report
folder, words, kills = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
chance = random.Random(kills)
for number in range(kills + 1):
    resume = ["--resume"] if os.path.exists(folder + "/settings.json") else []
    child = os.fork()
    if child == 0:
        try:
            os._exit(cli.main([*words, "--out", folder, *resume]))
        finally:
            os._exit(1)
    until = time.monotonic() + (chance.uniform(0.5, 6) if number < kills else 200)
    done = 0
    while not done and time.monotonic() < until:
        time.sleep(0.005)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, [signal.SIGKILL, signal.SIGTERM, signal.SIGINT][number % 3])
        _, status = os.waitpid(child, 0)
    print(number, "ended by", os.waitstatus_to_exitcode(status), flush=True)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_has_the_same_numbers(tmp_path) -> None:
    community_graph(per_group=60).save(tmp_path / "data")
    options = "--hidden 8 --batch-size 8 --fan-outs 3 --epochs 8 --seeds 2 --dropout 0.1 --patience 4 --eval-every 1"
    words = ["--sampled", "--data", str(tmp_path / "data"), *options.split(), "--checkpoint-every", "1"]
    env = os.environ | {"DEJAX_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for kills in (0, 9):
        out = tmp_path / f"out{kills}"
        command = [sys.executable, "-c", RUN, str(out), json.dumps(words), str(kills)]
        ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        histories = sorted(
            (out / "checkpoints").glob("*/*/history/metadata")
        )  # of the last and best states of both seeds
        curves = [json.loads(path.read_text()) for path in histories]
        numbers = [[curve[name] for name in ("loss", "epochs", "measures", "steps")] for curve in curves]
        names = [path.parts[-4:-2] for path in histories]
        found.append([json.loads((out / "results.json").read_text())["accuracy"], names, numbers])
        assert not [path for path in out.rglob(".*") if path.name.startswith(".dejax-")]
    assert len(found[0][1]) == 4 and found[0] == found[1]
