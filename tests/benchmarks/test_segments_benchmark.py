"""`benchmarks/segments.py` on tiny shapes: checks, tables, ratios."""

import json

import pytest

from benchmarks import segments
from benchmarks.__main__ import main


@pytest.mark.parametrize("gathered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_case_is_checked_and_timed(gathered):
    row = segments.measure(segments.Case(200, 20, 3, "bfloat16", gathered=gathered))
    assert {"ours_ms", "plan_ms", "jax_ms", "ratio", "predicted_ms", "bound_ms"} <= row.keys()
    assert row["error"] < 2.0**-8


def test_a_wrong_result_is_found(monkeypatch):
    monkeypatch.setattr(segments.segment, "segment_sum", lambda d, i, n, *_, **__: d[:n] * 2)
    with pytest.raises(AssertionError):
        segments.measure(segments.Case(50, 5, 2))


def test_the_command_writes_a_table(tmp_path, capsys):
    main(["segments", "--quick", "--only", "38806 into 16", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "segments.json").read_text())["rows"]
    assert row["ours_ms"] > 0 and "geometric mean" in capsys.readouterr().out
