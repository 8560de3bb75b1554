"""README is true: its examples run as shown, tables and chart are those of the JSON, its commands exist."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import render_tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_run_as_shown(capsys):
    names = {}
    for number, block in enumerate(BLOCKS[1:], start=1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    out = capsys.readouterr().out
    # What the text says of the first example: the product is computed once per source pair, not once per edge.
    kernels = out.split("== forward, without gradients", 1)[1].split("\n== ")[0]
    assert " by source_pair.etype, k,kn->n" in kernels and " by etype, " not in kernels
    assert names["y"].shape == () and names["gradient"].shape == names["w"].shape
    assert names["loss"](names["jnp"].ones(128), names["features"], names["jnp"].array([3, 9_999, 17])) == 3 * 128
    assert "offload: 8.39 MB stored in 1 runs" in out and names["ws_gradient"].shape == (4, 512, 512)


def test_the_examples_are_short():
    assert len(BLOCKS) == 4
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 26 for block in BLOCKS)


@pytest.mark.slow
def test_the_model_trains_as_shown(capsys):
    names = {}
    exec(compile(BLOCKS[0], "README.md, Python block 0", "exec"), names)
    assert names["accuracy"] > 0.55 > 2 * names["data"].majority_accuracy
    printed = re.compile(r"\d\d % of the test nodes, \d\d % by the most frequent class\n")
    assert printed.fullmatch(capsys.readouterr().out) and printed.search(README)


def test_tables_and_the_chart_are_those_of_the_results():
    for path, (old, new) in render_tables.rendered(render_tables.RESULTS).items():
        assert old == new, f"{path.name}: run python -m benchmarks.render_tables"


def test_a_changed_result_changes_its_table_and_the_chart(tmp_path):
    run = json.loads((render_tables.RESULTS / "accuracy_aifb_rgcn.json").read_text(encoding="utf-8"))
    run["accuracy"]["test"]["mean"] = 0.1234
    (tmp_path / "accuracy_x.json").write_text(json.dumps(run), encoding="utf-8")
    speed = json.loads((render_tables.RESULTS / render_tables.PERFORMANCE).read_text(encoding="utf-8"))
    ours = (r for r in speed["results"] if (r["graph"], r["implementation"]) == ("am", "dejax"))
    cell = next(r for r in ours if r["settings"]["precision"] == "tf32")
    cell["training"] |= {"ms": 98.7, "device": None}
    (tmp_path / render_tables.PERFORMANCE).write_text(json.dumps(speed), encoding="utf-8")
    shutil.copy(render_tables.RESULTS / render_tables.OFFLOAD, tmp_path)
    changed = {path: new for path, (old, new) in render_tables.rendered(tmp_path).items() if new != old}
    assert render_tables.CHART in changed and render_tables.ROOT / "README.md" in changed
    assert "12.3 ±" in changed[render_tables.ROOT / "examples" / "README.md"]
    speed_page = changed[render_tables.ROOT / "docs" / "performance" / "rgnn.md"]
    assert " 98.7* |" in speed_page
    assert (
        render_tables.render(speed_page, render_tables.RESULTS)
        == render_tables.pages()[render_tables.ROOT / "docs" / "performance" / "rgnn.md"]
    )


def test_a_table_without_its_markers_is_refused(monkeypatch):
    monkeypatch.setattr(render_tables, "pages", lambda: {ROOT / "README.md": "no table here"})
    with pytest.raises(ValueError, match="markers of table 'means' must be on one page, got none"):
        render_tables.rendered(render_tables.RESULTS)


def test_stored_results_are_consistent_with_the_published_accuracy():
    """Reads the stored results alone: training again is `test_aifb_reaches_the_published_accuracy`."""
    run = json.loads((ROOT / "benchmarks" / "results" / "accuracy_aifb_rgcn.json").read_text(encoding="utf-8"))
    assert len(run["accuracy"]["test"]["runs"]) == 10 and run["accuracy"]["test"]["mean"] >= 0.96
    assert run["settings"]["hidden"] == 16 and run["settings"]["epochs"] == 50 and run["settings"]["lr"] == 0.01
    assert run["time"]["total_s"] < 60


def test_stored_results_name_no_folder():
    for path in (ROOT / "benchmarks" / "results").glob("accuracy_*.json"):
        command = json.loads(path.read_text(encoding="utf-8"))["command"]
        assert command.startswith("python examples/entity_classification.py") and " /" not in command, path.name


def test_commands_named_exist():
    pages = [README, *((ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "examples/README.md"))]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in pages:
        for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", page, re.MULTILINE):
            assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target
        for script in re.findall(r"python ((?:examples|benchmarks)/\S+\.py)", page):
            assert (ROOT / script).exists(), script
