"""Sizes that no run can have end every example with one line, not with a traceback."""

import importlib

import pytest


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
def test_a_size_of_zero(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"examples.{name}").main([f"--{option}", "0"])
    assert f"--{option} must be at least 1, got 0" in capsys.readouterr().err
