"""The GPT example: equal losses with and without offload, and a resumed run continues where it stopped."""

import importlib.util
import json
from pathlib import Path

import pytest

from dejax import _native

pytestmark = pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
PATH = Path(__file__).parents[2] / "examples/train_gpt.py"
TINY = "--layers 2 --width 32 --heads 2 --sequence 32 --batch 2 --report 2 --checkpoint 4 --min-bytes 1".split()


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(path: Path) -> list[float]:
    return json.loads((path / "losses.json").read_text())["losses"]


@pytest.mark.full
def test_same_losses_and_resume(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "read_text", lambda: bytes(range(256)) * 64)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert example.main([*TINY, "--compare", "inputs", "--steps", "4", "--out", str(tmp_path)]) == 0
    assert "4 steps, losses that differ: 0" in capsys.readouterr().out
    assert (tmp_path / "loss.svg").exists()
    before = losses(tmp_path / "inputs")
    again = [*TINY, "--offload", "inputs", "--out", str(tmp_path / "inputs"), "--steps", "6", "--resume"]
    assert example.main(again) == 0
    assert "goes on after step 4" in capsys.readouterr().out
    assert len(losses(tmp_path / "inputs")) == 6 and losses(tmp_path / "inputs")[:4] == before


def test_a_second_run_replaces_the_first(example, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "read_text", lambda: bytes(range(256)) * 64)
    command = [*TINY, "--out", str(tmp_path), "--steps"]
    assert example.main([*command, "4"]) == 0
    first = losses(tmp_path)
    assert example.main([*command, "4"]) == 0
    assert losses(tmp_path) == first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_checkpoints_of_others_are_kept(example, tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"--out must be a new folder.*--resume.*another --out"):
        example.main([*TINY, "--out", str(tmp_path)])
    assert (tmp_path / "checkpoints" / "4").exists()


def test_text_is_there(example):
    assert len(example.read_text(1 << 20)) == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--width 30 --heads 4", "--width 30 must be a multiple of --heads 4"),
        ("--checkpoint 15 --report 10", "--checkpoint 15 must be a multiple of --report 10"),
        ("--host-bytes 1000", "need --offload"),
        ("--offload all --store nowhere", "--store must be a folder, got nowhere; create it"),
    ],
)
def test_bad_arguments(example, arguments, words, capsys):
    with pytest.raises(SystemExit):
        example.main(arguments.split())
    assert words in capsys.readouterr().err
