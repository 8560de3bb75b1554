"""`examples/train_gpt.py` as a command: equal losses with and without offload, checkpoints, and its errors."""

import json
from pathlib import Path

import jax
import pytest

from examples import train_gpt as example

TINY = (
    "--layers 2 --width 32 --heads 2 --kv-heads 1 --sequence 32 --batch 2 --report 2 --checkpoint 4 --min-bytes 1"
    " --dtype float32"
).split()


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(bytes(range(1, 256)) * 16)
    (folder / "deep" / "b.txt").write_text("the second file\n" * 50)
    (folder / "no_text.bin").write_bytes(b"\0" * 100)
    return ["--text", str(folder)]


def losses(path: Path) -> list[float]:
    return json.loads((path / "losses.json").read_text())["losses"]


@pytest.mark.slow
def test_same_losses_with_and_without_offload(text, tmp_path, monkeypatch, capsys):
    jax.devices()  # with the flags of the tests; the example adds to them
    monkeypatch.setenv("XLA_FLAGS", "")
    assert example.main([*TINY, *text, "--compare", "inputs", "--steps", "4", "--out", str(tmp_path)]) == 0
    assert "4 steps, losses that differ: 0" in capsys.readouterr().out
    assert (tmp_path / "loss.svg").exists()


@pytest.mark.slow
def test_state_in_host_memory_survives_a_resume(text, tmp_path):
    command = [*TINY, *text, "--state", "all", "--offload", "inputs", "--plot-store", "--out", str(tmp_path)]
    assert example.main([*command, "--steps", "4"]) == 0
    before = losses(tmp_path)
    assert example.main([*command, "--steps", "6", "--resume"]) == 0
    assert len(losses(tmp_path)) == 6 and losses(tmp_path)[:4] == before
    assert (tmp_path / "store.svg").exists() and json.loads((tmp_path / "store.trace.json").read_text())["traceEvents"]


def test_checkpoints_of_others_are_kept(tmp_path, capsys):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(SystemExit):
        example.main([*TINY, "--out", str(tmp_path)])
    assert "--out must be a new folder" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "4").exists()


def test_text(text):
    assert len(example.read_text(limit=1 << 20)) == 1 << 20
    found = example.read_text(Path(text[1]))
    assert found == bytes(range(1, 256)) * 16 + b"the second file\n" * 50
    one, again = (example.batch_at(found, 3, seed=0, batch=2, sequence=8) for _ in range(2))
    assert (one == again).all() and one.shape == (2, 9)
    with pytest.raises(ValueError, match="must have more than 10000 bytes, got"):
        example.batch_at(found, 0, seed=0, batch=2, sequence=10_000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--width 30 --heads 4", "--width 30 must be a multiple of --heads 4"),
        ("--checkpoint 15 --report 10", "--checkpoint 15 must be a multiple of --report 10"),
        ("--host-bytes 1000", "need --offload"),
        ("--offload all --store nowhere", "--store must be a folder, got nowhere; create it"),
        ("--state all --offload all", "`offload` must be 'remat' or 'inputs' where"),
        ("--text nowhere", "nowhere must be a folder of text"),
        ("--mesh 99", "`devices` must be 1 to"),
        ("--sample x --out nowhere", "nowhere must hold a checkpoint"),
    ],
)
def test_bad_arguments(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        example.main([*TINY, *arguments.split()])
    assert words in capsys.readouterr().err
