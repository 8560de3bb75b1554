"""`benchmarks/idioms.py` on a tiny graph."""

import json

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize("measured", [False, True])
def test_the_command_writes_both_forms(tmp_path, measured):
    how = ["--compile-threads", "1"] if measured else ["--predict"]
    main(["idioms", "--names", "appnp", "--counts", "30,90,2", *how, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "idioms.json").read_text())["appnp"]
    assert {form: set(times) for form, times in found.items()} == {
        form: {"forward", "training"} for form in ("written", "by_hand")
    }
