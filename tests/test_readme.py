"""README says what is so: its example runs as shown, its tables are those of the JSON, its files and commands exist."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.newest_jax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _render_tables():
    path = ROOT / "benchmarks" / "render_tables.py"
    spec = importlib.util.spec_from_file_location("render_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_examples_run_as_shown(capsys):
    names = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    out = capsys.readouterr().out
    assert names["accuracy"] > 0.55 > 2 * names["data"].majority_accuracy
    assert f"{100 * names['accuracy']:.0f} % of the test nodes" in out
    # What the text says of the second example: the product is made for each source pair, never for each edge.
    kernels = out[out.index("== forward, without gradients") :].partition("==")[2]
    assert "types by source_pair.etype" in kernels and "types by etype" not in kernels
    assert names["y"].shape == () and names["gradient"].shape == names["w"].shape


def test_a_graph_of_ones_own_is_made_as_shown():
    names = {}
    exec(compile(BLOCKS[2], "README.md, Python block 2", "exec"), names)
    assert repr(names["mine"]).startswith("RelGraph(nodes=3, edges=3, edge_types=2,")


def test_there_are_three_examples_and_the_first_is_short():
    assert len(BLOCKS) == 3
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 26


def test_tables_are_those_of_the_results():
    tables = _render_tables()
    assert tables.render(README, tables.RESULTS) == README, "run python benchmarks/render_tables.py"


def test_a_changed_result_changes_the_table(tmp_path):
    tables = _render_tables()
    run = json.loads((tables.RESULTS / "accuracy_aifb_rgcn.json").read_text(encoding="utf-8"))
    run["accuracy"]["test"]["mean"] = 0.1234
    (tmp_path / "accuracy_x.json").write_text(json.dumps(run), encoding="utf-8")
    speed = json.loads((tables.RESULTS / tables.PERFORMANCE).read_text(encoding="utf-8"))
    ours = (r for r in speed["results"] if (r["graph"], r["implementation"]) == ("am", "dejax"))
    cell = next(r for r in ours if r["settings"]["precision"] == "tf32")
    cell["training"] |= {"ms": 98.7, "device": None}
    (tmp_path / tables.PERFORMANCE).write_text(json.dumps(speed), encoding="utf-8")
    shutil.copy(tables.RESULTS / tables.OFFLOAD, tmp_path)
    changed = tables.render(README, tmp_path)
    assert changed != README and "12.3 ±" in changed and " 98.7* |" in changed
    assert tables.render(changed, tables.RESULTS) == README


def test_a_text_without_markers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no markers"):
        _render_tables().render("no table here", tmp_path)


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


def test_files_and_targets_named_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+) ", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script in re.findall(r"python ((?:examples|benchmarks)/\S+\.py)", README):
        assert (ROOT / script).exists(), script
