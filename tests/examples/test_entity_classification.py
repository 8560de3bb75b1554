"""The training command end to end on a tiny RDF data set, and the published figure on AIFB if its files exist."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dejax import datasets
from dejax.training import Trainer, cli, resolve
from dejax.training.checkpoint import Checkpoints, find_run, read_settings
from dejax.training.data import split_nodes
from dejax.training.report import machine_kind, without_folders

from .tiny import write_aifb

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "entity_classification.py"


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    return write_aifb(tmp_path_factory.mktemp("data") / "aifb")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.delenv("DEJAX_DATA", raising=False)
        yield


@pytest.fixture
def command(data_folder, tmp_path, capsys):
    """Runs the command on the tiny data set: exit status, stdout and stderr."""

    def run(*words, out="run"):
        words = [str(w) for w in words]
        place = [] if "--evaluate" in words else ["--dataset", "aifb", "--out", str(tmp_path / out)]
        status = cli.main([*words, "--data", str(data_folder), *place])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def finished(data_folder, tmp_path_factory):
    """One run of two seeds: its folder and its output. Tests only read it."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("finished")
    words = ["--dataset", "aifb", "--data", data_folder, "--out", folder, "--seeds", "2", "--epochs", "20"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert cli.main([str(word) for word in words]) == 0
    return folder, text.getvalue()


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_run_learns_and_prints_its_accuracy(finished):
    folder, out = finished
    found = results(folder)
    assert found["accuracy"]["test"]["mean"] >= 0.8
    assert found["baselines"]["majority"] == pytest.approx(1 / 3)
    assert found["baselines"]["no_edges"]["mean"] <= 0.5
    assert len(found["accuracy"]["test"]["runs"]) == 2
    assert found["time"]["epoch_ms"] > 0 and found["time"]["total_s"] > found["time"]["compile_s"] > 0
    assert found["memory"]["bytes"] > 2**20
    assert found["machine"]["kind"] == machine_kind() and found["versions"]["jax"] == jax.__version__
    # The output ends with the table, which agrees with the JSON.
    table = out[out.index("accuracy, %") :].splitlines()
    rows = {line[:26].strip(): line[26:].split() for line in table}
    assert rows["R-GCN, test"][0] == f"{100 * found['accuracy']['test']['mean']:.1f}"
    assert rows["majority class, test"] == ["33.3"]
    assert rows["no edges (MLP), test"][0] == f"{100 * found['baselines']['no_edges']['mean']:.1f}"
    for what in ("time per epoch", "compilation", "peak memory", "machine", str(folder / "curves.png")):
        assert what in out
    assert Checkpoints(folder).seeds() == [0, 1]


def test_the_plot_is_a_picture_of_both_curves(finished):
    from matplotlib.image import imread

    picture = imread(finished[0] / "curves.png")[..., :3]
    assert picture.shape[1] > picture.shape[0] > 400
    left, right = picture[:, : picture.shape[1] * 2 // 5], picture[:, picture.shape[1] * 2 // 5 :]
    blue, orange = np.array([0x00, 0x72, 0xB2]) / 255, np.array([0xD5, 0x5E, 0x00]) / 255
    for half, colour in ((left, blue), (right, blue), (right, orange)):
        assert (np.abs(half - colour).max(-1) < 0.02).sum() > 100, "a curve is missing"


def test_evaluate_gives_the_accuracies_of_the_run(command, finished):
    folder = finished[0]
    found = results(folder)["accuracy"]["test"]["runs"]
    status, out, _ = command("--evaluate", folder)
    assert status == 0
    for seed, accuracy in enumerate(found):
        line = out.splitlines()[seed]
        assert line.startswith(f"seed {seed}, epoch 20") and f"test {100 * accuracy:.2f} %" in line
    _, out, _ = command("--evaluate", folder / "checkpoints" / "seed1")
    assert out.count("\n") == 1 and out.startswith("seed 1, epoch 20")


@pytest.mark.full
def test_a_resumed_run_equals_one_that_never_stopped(command, tmp_path):
    # Dropout shows a random key that is lost or drawn twice. The run stops at a multiple of --eval-every, since a piece
    # of another length is another XLA program, which may round differently.
    common = ("--seeds", "1", "--dropout", "0.4", "--no-baseline", "--eval-every", "3")
    command(*common, "--epochs", "9", out="whole")
    command(*common, "--epochs", "6", out="parts")
    command(*common, "--epochs", "9", "--resume", out="parts")
    whole, parts = (_restored(tmp_path / name) for name in ("whole", "parts"))
    np.testing.assert_array_equal(parts[1].loss, whole[1].loss)
    assert len(whole[1].loss) == 9
    jax.tree.map(np.testing.assert_array_equal, parts[0], whole[0])
    loss = np.array(whole[1].loss)
    assert loss[-1] < loss[0]


def _restored(folder):
    checkpoints, settings = Checkpoints(folder), read_settings(folder)
    trainer = Trainer(settings, datasets.load("aifb", write_aifb(folder.parent / "copy")))
    return checkpoints.restore(0, trainer.abstract_state())


def test_resume_trains_only_missing_epochs_and_seeds(command, tmp_path):
    command("--seeds", "1", "--epochs", "4", "--no-baseline")
    before = (tmp_path / "run" / "checkpoints" / "seed0" / "4").stat().st_mtime_ns
    command("--seeds", "2", "--epochs", "4", "--no-baseline", "--resume")
    assert (tmp_path / "run" / "checkpoints" / "seed0" / "4").stat().st_mtime_ns == before
    assert len(results(tmp_path / "run")["accuracy"]["test"]["runs"]) == 2


def test_resume_refuses_other_settings_and_names_them(command, tmp_path):
    command("--seeds", "1", "--epochs", "2", "--no-baseline")
    status, _, err = command("--seeds", "1", "--epochs", "4", "--hidden", "8", "--resume")
    assert status == 2 and "hidden=8 (it has 16)" in err
    # the earlier run is still there
    assert Checkpoints(tmp_path / "run").latest(0) == 2
    status, _, err = command("--resume", out="nowhere")
    assert status == 2 and "holds no run" in err


@pytest.mark.full
def test_a_run_without_resume_removes_earlier_checkpoints(command, tmp_path):
    command("--seeds", "2", "--epochs", "2", "--no-baseline")
    command("--seeds", "1", "--epochs", "2", "--no-baseline")
    assert Checkpoints(tmp_path / "run").seeds() == [0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hidden", "0"), "hidden must be at least 1"),
        (("--model", "hgt", "--heads", "3"), "heads must divide hidden"),
        (("--holdout", "0.999"), "leaves none of the 72 training nodes"),
        (("--evaluate", "nothing-here"), "not in the folder of a run"),
    ],
)
def test_misuse_prints_one_line_on_stderr(command, words, message):
    status, _, err = command(*words)
    assert status == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_an_unknown_data_set_is_named(capsys):
    assert cli.main(["--dataset", "nonsense", "--out", os.devnull]) == 2
    assert "name must be one of" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("model", ["rgat", "hgt"])
def test_attention_models_learn_the_task(command, tmp_path, model):
    command("--model", model, "--seeds", "1", "--epochs", "40", "--no-baseline", "--no-checkpoints")
    assert results(tmp_path / "run")["accuracy"]["test"]["mean"] >= 0.8


@pytest.mark.slow
def test_the_kernels_train_as_xla_does(data_folder):
    """`--backend pallas`, interpreted without a GPU, has the same losses and accuracies."""
    data = datasets.load("aifb", data_folder)
    curves = {}
    for backend in ("xla", "pallas"):
        trainer = Trainer(resolve("aifb", epochs=3, eval_every=3, precision="f32"), data, backend=backend)
        *_, (_, last) = trainer.run(trainer.init(0), 3)
        curves[backend] = last
    np.testing.assert_allclose(curves["pallas"].loss, curves["xla"].loss, rtol=1e-4)
    assert curves["pallas"].loss[-1] < curves["pallas"].loss[0]
    assert curves["pallas"].accuracy == pytest.approx(curves["xla"].accuracy, abs=0.03)


def test_the_graph_is_an_argument_of_the_step_and_no_constant(data_folder):
    data = datasets.load("aifb", data_folder)
    trainer = Trainer(resolve("aifb", epochs=2), data)
    state = trainer.init(0)
    text = jax.jit(trainer.step).lower(state, trainer.batch).as_text()
    assert f"tensor<{trainer.batch.graph.num_edges}xi32>" in text  # the program reads edge lists ..
    assert "dense_resource" not in text
    longest = max((line for line in text.splitlines() if "stablehlo.constant" in line), key=len)
    assert len(longest) < 300, longest[:300]  # .. but has none as a constant


def test_the_step_is_adam_on_the_mean_cross_entropy(data_folder):
    """One step of a seed against numpy, with JAX's gradient of a loss that is written out here."""
    trainer = Trainer(resolve("aifb", lr=0.1, l2=0.01), datasets.load("aifb", data_folder))
    state = trainer.init(3)

    def loss(params):
        logits = trainer.logits(params, trainer.batch)[trainer.batch.nodes["train"]]
        picked = jax.nn.log_softmax(logits)[np.arange(72), np.asarray(trainer.batch.labels["train"])]
        first = params["layers"][0]
        return -picked.mean() + 0.01 * sum((first[name].get_value() ** 2).sum() for name in ("weight", "root"))

    value, gradients = jax.value_and_grad(loss)(state.params)
    after, reported = trainer.step(state, trainer.batch)
    np.testing.assert_allclose(reported, value, rtol=1e-5)
    for p, g, q in zip(*map(jax.tree.leaves, (state.params, gradients, after.params)), strict=True):
        step = np.where(np.abs(g) > 1e-6, 0.1 * np.asarray(g) / (np.abs(g) + 1e-8), 0.0)
        moved = np.where(np.abs(g) > 1e-6, np.asarray(p) - np.asarray(q), 0.0)
        np.testing.assert_allclose(moved, step, rtol=1e-3, atol=1e-5)


def test_seeds_differ_and_repeat(data_folder):
    trainer = Trainer(resolve("aifb"), datasets.load("aifb", data_folder))
    a, b, again = (jax.tree.leaves(trainer.init(seed).params) for seed in (0, 1, 0))
    assert all((x == y).all() for x, y in zip(a, again, strict=True))
    assert any((x != y).any() for x, y in zip(a, b, strict=True))


def test_the_baseline_ignores_edges(data_folder):
    data = datasets.load("aifb", data_folder)
    trainer = Trainer(resolve("aifb", "mlp"), data)
    other = Trainer(resolve("aifb", "mlp"), _shuffled(data))
    params = trainer.init(0).params
    np.testing.assert_array_equal(trainer.logits(params, trainer.batch), other.logits(params, other.batch))
    relational = Trainer(resolve("aifb"), data)
    params = relational.init(0).params
    assert not np.array_equal(
        relational.logits(params, relational.batch),
        relational.logits(params, type(relational.batch)(_reversed(data), None, {}, {})),
    )


def _shuffled(data):
    import dataclasses

    return dataclasses.replace(data, senders=np.random.default_rng(1).permutation(data.senders))


def _reversed(data):
    """A graph with as many edges and pairs of each type, with all edges reversed."""
    import dataclasses

    return dataclasses.replace(data, senders=data.receivers, receivers=data.senders).graph(add_reverse=True)


def test_held_out_nodes_come_from_the_training_nodes(data_folder):
    data = datasets.load("aifb", data_folder)
    splits = split_nodes(data, 0.25)
    assert len(splits["valid"]) == 18 and len(splits["train"]) == 54
    assert sorted([*splits["train"], *splits["valid"]]) == sorted(data.train_nodes)
    np.testing.assert_array_equal(splits["test"], data.test_nodes)
    np.testing.assert_array_equal(split_nodes(data, 0.25)["valid"], splits["valid"])
    folds = [split_nodes(data, 0.25, fold) for fold in range(4)]
    assert sorted(np.concatenate([fold["valid"] for fold in folds])) == sorted(data.train_nodes)
    assert all(not set(fold["valid"]) & set(fold["train"]) for fold in folds)
    with pytest.raises(ValueError, match="fold must be less than 4"):
        split_nodes(data, 0.25, 4)


def test_published_settings():
    assert (resolve("aifb").hidden, resolve("aifb").epochs, resolve("aifb").lr) == (16, 50, 0.01)
    assert (resolve("am").hidden, resolve("am").bases, resolve("am").l2) == (10, 40, 5e-4)
    assert resolve("am", hidden=3, bases=0).hidden == 3 and resolve("am", bases=0).bases is None
    assert resolve("aifb", hidden=None).hidden == 16


def test_results_hold_no_folder_of_this_machine():
    words = ["--data", "/secret/a", "--out=/secret/b", "--model", "hgt", "--out", "/secret/c"]
    assert without_folders(words) == ["--data", "FOLDER", "--out=FOLDER", "--model", "hgt", "--out", "FOLDER"]


def test_find_run(finished):
    run = finished[0]
    assert find_run(run) == (run, None)
    assert find_run(run / "checkpoints" / "seed0") == (run, 0)
    assert find_run(run / "checkpoints" / "seed0" / "20") == (run, 0)


def test_the_example_and_the_module_are_the_command(monkeypatch):
    for arguments in ([str(EXAMPLE)], ["-m", "dejax.training"]):
        shown = subprocess.run(
            [sys.executable, *arguments, "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert shown.returncode == 0 and "--evaluate CHECKPOINT" in shown.stdout, shown.stderr
    assert runpy.run_path(str(EXAMPLE))["main"] is cli.main


def _aifb_folder():
    places = [os.environ.get("DEJAX_DATA"), ROOT.parent / "shared" / "data"]
    for place in (Path(p) for p in places if p):
        for folder in (place / "aifb", place):
            if (folder / "aifb_stripped.nt.gz").exists():
                return folder
    return None


AIFB = _aifb_folder()


@pytest.mark.slow
@pytest.mark.skipif(AIFB is None, reason="AIFB's files are not here: name their folder in DEJAX_DATA")
def test_aifb_reaches_the_published_accuracy(tmp_path):
    """R-GCN paper, table 2: 95.83 %. 10 seeds at the published setting; nothing is chosen on the test nodes."""
    assert cli.main(["--dataset", "aifb", "--data", str(AIFB), "--out", str(tmp_path), "--no-checkpoints"]) == 0
    found = results(tmp_path)
    assert len(found["accuracy"]["test"]["runs"]) == 10
    assert found["accuracy"]["test"]["mean"] >= 0.96
    assert found["baselines"]["majority"] == pytest.approx(15 / 36)
