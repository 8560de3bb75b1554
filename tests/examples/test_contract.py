"""What `examples/` promises: each script runs in a small size and learns, and says what its options are."""

import ast
import functools
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from examples import graphsage_host_features, rgnn_deep, segment_jraph, segment_molecule, train_gpt

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("segment_jraph", "graphs"),
        ("segment_molecule", "width"),
        ("graphsage_host_features", "nodes"),
        ("rgnn_deep", "layers"),
        ("train_gpt", "batch"),
    ],
)
def test_a_size_of_zero_is_an_error_of_one_line(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"examples.{name}").main([f"--{option}", "0"])
    assert f"--{option} must be at least 1, got 0" in capsys.readouterr().err


def bare_options(source: str) -> list[str]:
    """The options that `add_argument` gets without `help`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        ast.unparse(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument" and call.args
        # `**` may bring a help text.
        if not any(keyword.arg in ("help", None) for keyword in call.keywords)
    ]


def test_every_option_of_a_command_says_what_it_does() -> None:
    assert bare_options('p.add_argument("--a"); p.add_argument("--b", help="b")') == ["'--a'"]
    folders = ("examples", "benchmarks", "dejax")
    texts = {path: path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert not {
        path.name: bare_options(text) for path, text in texts.items() if "add_argument" in text and bare_options(text)
    }


GRAPHSAGE = (
    "--nodes 2000 --edges 20000 --width 20 --hidden 16 --classes 4 --batch 64 --fan-outs 4,3 --steps 150".split()
)


def test_graphsage_learns_from_features_in_host_memory() -> None:
    assert graphsage_host_features.main(GRAPHSAGE)["accuracy"] > 0.5


@pytest.mark.slow
def test_graphsage_learns_as_much_where_numpy_gathers() -> None:
    ours, theirs = (
        graphsage_host_features.main(GRAPHSAGE),
        graphsage_host_features.main([*GRAPHSAGE, "--pipeline", "cpu"]),
    )
    assert abs(ours["accuracy"] - theirs["accuracy"]) < 0.05


def test_offloaded_layers_learn_the_same_in_less_memory() -> None:
    small = "--nodes 300 --edges 1500 --width 16 --layers 6 --steps 8".split()
    far, near = rgnn_deep.main(small), rgnn_deep.main([*small, "--offload", "remat"])
    np.testing.assert_allclose(far["losses"], near["losses"], rtol=1e-4)
    assert far["losses"][-1] < far["losses"][0]
    assert far["stored_bytes"] == 8 * 6 * 300 * 16 * 4 and near["stored_bytes"] == 0
    assert far["temp_bytes"] < near["temp_bytes"]


JRAPH = ["--steps", "60", "--graphs", "8", "--operators"]


def test_a_jraph_network_learns_with_our_operators() -> None:
    assert segment_jraph.main([*JRAPH, "dejax"]) > 0.75


@pytest.mark.slow
def test_a_jraph_network_learns_as_much_with_its_own_operators() -> None:
    assert segment_jraph.main([*JRAPH, "dejax"]) == pytest.approx(segment_jraph.main([*JRAPH, "jraph"]), abs=0.05)


@pytest.mark.slow
def test_molecules_learn_energies_and_forces() -> None:
    first, last = segment_molecule.main(["--molecules", "4", "--atoms", "5", "--steps", "60"])
    assert last < first / 3


def test_a_resumed_gpt_has_the_losses_of_a_run_that_never_stopped(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(bytes(range(1, 256)) * 16)
    small = "--layers 2 --width 32 --heads 2 --kv-heads 1 --sequence 32 --batch 2 --report 2 --dtype float32"
    command = [*small.split(), "--text", str(tmp_path / "text"), "--checkpoint", "2", "--warmup", "1", "--out"]
    # The schedule ends with the run, so both runs have the same end; the second is stopped after its first checkpoint.
    monkeypatch.setattr(train_gpt, "make_trainer", functools.cache(train_gpt.make_trainer))  # compiled once
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train_gpt.main([*command, str(whole), "--steps", "4"]) == 0
    assert [path.name for path in (whole / "checkpoints" / "seed0").iterdir()] == ["4"]
    save = train_gpt.Checkpoints.save

    def stop(self, seed, number, *rest):
        save(self, seed, number, *rest)
        if number == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.Checkpoints, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            train_gpt.main([*command, str(stopped), "--steps", "4"])
    assert train_gpt.main([*command, str(stopped), "--steps", "4", "--resume"]) == 0
    assert "goes on after step 2" in capsys.readouterr().out
    found = [json.loads((path / "losses.json").read_text())["losses"] for path in (stopped, whole)]
    assert found[0] == found[1] and len(found[0]) == 4
    for change, words in (
        ("--rate 0.5", "got rate=0.5 (it has 0.001)"),
        ("--seed 5", "got seed=5 (it has 0)"),
        ("--state all --clip 0", "got clip=0.0 (it has 1.0), layout='by layer' (it has 'whole')"),
    ):
        with pytest.raises(SystemExit):
            train_gpt.main([*command, str(whole), "--steps", "6", "--resume", *change.split()])
        assert words in capsys.readouterr().err
    sampling = [*command, str(whole), "--steps", "4", "--sample", "the ", "--length", "12"]
    train_gpt.main(sampling)
    first = capsys.readouterr().out
    train_gpt.main(sampling)
    assert first == capsys.readouterr().out and first.startswith("the ")
