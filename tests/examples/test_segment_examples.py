"""The two examples of segment operators, shortened."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_jraph_networks_train_alike_with_both_operators():
    main = example("segment_jraph").main
    found = [main(["--steps", "60", "--graphs", "8", "--operators", name]) for name in ("dejax", "jraph")]
    assert found[0] == pytest.approx(found[1], abs=0.05) and found[0] > 0.75


def test_molecules_learn_energies_and_forces():
    first, last = example("segment_molecule").main(["--molecules", "4", "--atoms", "5", "--steps", "60"])
    assert last < first / 3
