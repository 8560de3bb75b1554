"""What `dejax-train` promises: runs that learn, end with a table, and resume to the same numbers; mistakes in one line.

Each task once, on data that trains in a second. A step that is not finite changes nothing and is counted.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import datasets
from dejax.training import Checkpoints, Trainer, resolve
from dejax.training.command import cli
from dejax.training.command.report import machine_kind
from dejax.training.trainer import _DrawnAhead
from tests.examples.tiny import write_aifb
from tests.training.graphs import community_graph


@pytest.fixture(scope="module")
def aifb(tmp_path_factory):
    return write_aifb(tmp_path_factory.mktemp("data") / "aifb")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.delenv("DEJAX_DATA", raising=False)
        yield


@pytest.fixture(scope="module")
def finished(aifb, tmp_path_factory):
    """One run of two seeds: its folder and its output. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["--dataset", "aifb", "--data", aifb, "--out", folder, "--seeds", "2", "--epochs", "20"]
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
    assert found["time"]["step_ms"] > 0 and found["time"]["total_s"] > found["time"]["compile_s"] > 0
    assert found["memory"]["bytes"] > 2**20
    assert found["machine"]["kind"] == machine_kind() and found["versions"]["jax"] == jax.__version__
    # The output ends with the table, which agrees with the JSON.
    table = out[out.index("accuracy, %") :].splitlines()
    rows = {line[:26].strip(): line[26:].split() for line in table}
    assert rows["R-GCN, test"][0] == f"{100 * found['accuracy']['test']['mean']:.1f}"
    assert rows["majority class, test"] == ["33.3"]
    assert rows["no edges (MLP), test"][0] == f"{100 * found['baselines']['no_edges']['mean']:.1f}"
    for what in ("time per step", "compilation", "peak memory", "machine", str(folder / "curves.png")):
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


def test_evaluate_gives_the_accuracies_of_the_run(finished, aifb, capsys):
    folder = finished[0]
    found = results(folder)["accuracy"]["test"]["runs"]
    assert cli.main(["--evaluate", str(folder), "--data", str(aifb)]) == 0
    out = capsys.readouterr().out
    for seed, accuracy in enumerate(found):
        line = out.splitlines()[seed]
        assert line.startswith(f"seed {seed}, epoch 20") and f"test {100 * accuracy:.2f} %" in line


def stopped_and_whole(trainer, epochs, stop, folder):
    """A state of a run that never stopped, and one that went through a checkpoint after some calls; losses of both."""

    def run(state, losses, calls=None):
        for now, found in itertools.islice(trainer.run(state, epochs), calls):
            state = now
            losses += found.loss if found else []
        return state

    whole, parts = [], []
    last = run(trainer.init(0), whole)
    stopped = run(trainer.init(0), parts, stop)
    checkpoints = Checkpoints(folder)
    checkpoints.save(0, int(stopped.step), trainer.exported(stopped), parts)
    plain, parts = checkpoints.restore(0, trainer.exported(trainer.init(0)))
    resumed = run(trainer.imported(plain), parts)
    return trainer.exported(last), trainer.exported(resumed), whole, parts


def check_equal(found):
    one, other, whole, parts = found
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert whole == parts and whole[-1] < whole[0]


def test_a_resumed_run_on_the_whole_graph_has_the_same_numbers(aifb, tmp_path):
    # Dropout shows a random key that is lost or drawn twice.
    settings = resolve("aifb", dropout=0.4, eval_every=3)
    check_equal(stopped_and_whole(Trainer(settings, datasets.load("aifb", aifb)), 9, 2, tmp_path))


def test_a_resumed_run_on_mini_batches_has_the_same_numbers_and_learns(tmp_path):
    """It stops within the second epoch of four steps."""
    tiny = {"hidden": 8, "batch_size": 8, "fan_outs": (3,), "lr": 0.05, "dropout": 0.1}
    trainer = Trainer(resolve("communities", "sage", task="samples", **tiny), community_graph())
    found = stopped_and_whole(trainer, 6, 6, tmp_path)
    check_equal(found)
    state = trainer.imported(found[0])
    assert trainer.final(state, inference="sampled")["test"] >= 0.8
    assert int(state.lost) == 0 and int(state.skipped) == 0


def test_a_resumed_run_of_links_has_the_same_numbers(tmp_path):
    tiny = {"hidden": 8, "batch_size": 256, "fan_outs": (-1,), "negatives": 4, "epochs": 3, "lr": 0.05, "eval_every": 3}
    data = datasets.synthetic_triples(0.004, num_clusters=1500, noise=0.0)
    trainer = Trainer(resolve("planted", "sage", task="links", full_batch=True, **tiny), data)
    found = stopped_and_whole(trainer, 3, 3, tmp_path)
    check_equal(found)
    measures = trainer.final(trainer.imported(found[0]))
    assert set(measures) == {"mrr", "hits@1", "hits@3", "hits@10"} and 0 < measures["mrr"] < 1


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(aifb):
    trainer = Trainer(resolve("aifb", eval_every=1), datasets.load("aifb", aifb))
    state = trainer.train(trainer.init(0), 1)
    leaves, treedef = jax.tree.flatten(state.params)
    params = jax.tree.unflatten(treedef, [leaves[0].at[(0,) * leaves[0].ndim].set(jnp.nan), *leaves[1:]])
    state = dataclasses.replace(state, params=params)
    before = jax.tree.map(np.array, trainer.exported(state))
    state = trainer.train(state, 2)
    assert int(state.skipped) == 1 and int(state.step) == 2
    after = trainer.exported(state)
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, after[name], before[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hidden 0", "hidden must be at least 1"),
        ("--model hgt --heads 3", "heads must divide hidden"),
        ("--holdout 0.999", "holdout must leave training nodes, got 0.999, which takes all 72"),
        ("--evaluate nothing-here", "must be the folder that --out gave"),
        ("--resume", "must be the folder of a run"),
        ("--resume --no-checkpoints", "--resume and --no-checkpoints must not be given together"),
        ("--fan-outs 3,2", "--fan-outs must be given only with --sampled or with --links or with tables; leave it out"),
        ("--sampled --links", "--sampled and --links must not be given together"),
        ("--sampled --fan-outs 4,x", "--fan-outs must be integers"),
        ("--sampled --fan-outs 4,0", "fan_outs must be numbers from 1, or -1"),
        ("--sampled --dropout 1.5", "dropout must be a share"),
        ("--sampled --mesh 4 --parts 6", "--parts must be a multiple of --mesh, 4, got 6"),
        ("--sampled --mesh 2 --full-batch", "must be given only for sampled training"),
        ("--sampled --mesh 99", "`devices` must be 1 to"),
        ("--sampled --layers 3", "--layers must be given only without --sampled, --links and tables; leave it out"),
        ("--links --decoder complex --hidden 15", "hidden must be even for complex"),
        ("--links --negatives 0", "negatives must be at least 1"),
        ("--links --model hgt", "model must be one of rgcn, rgat, sage, embeddings, got 'hgt'"),
        ("--links --dataset synthetic-triples-x", "with a positive number"),
        ("--links --dataset nothing", "--dataset must be one of stdlib"),
        ("--sampled --dataset nothing", "--dataset must be one of stdlib"),
        ("--dataset nothing", "name must be one of"),
        (f"--out {__file__}", "--out must be a folder, got"),
        ("--out /proc/run", "/proc/run"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(aifb, tmp_path, capsys, words, message):
    words = words.split()
    words = words if "--dataset" in words else [*words, "--dataset", "aifb"]
    assert cli.main(["--data", str(aifb), "--out", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        ("", ("--margin", "--class-weights", "--joint", "--l2", "CONFIG is a folder"), ()),
        ("tables", ("--class-weights", "--at", "--fan-outs", "CONFIG is a folder"), ("--margin", "--l2", "--dataset")),
        ("--links", ("--margin", "--fan-outs", "--dataset"), ("--class-weights", "--joint", "CONFIG is a folder")),
        ("--sampled", ("--joint", "--inference"), ("--margin", "--class-weights", "--at")),
    ],
)
def test_the_help_of_a_task_has_its_options(capsys, words, there, not_there):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words.split(), "--help"])
    text = capsys.readouterr().out
    listed = re.findall(r"^(?:  )?(--[\w-]+|CONFIG is a folder)", text, re.MULTILINE)
    assert set(there) <= set(listed) and not set(not_there) & set(listed)


def test_the_seeds_of_each_epoch_are_drawn_once_and_what_fails_ahead_is_raised():
    """Also where a seed begins in a later epoch, as a resumed one, or goes back to the first."""
    drawn = []

    def order(seed, epoch):
        drawn.append((seed, epoch))
        if epoch == 3:
            raise ValueError("no candidates")
        return 10 * seed + epoch

    orders = _DrawnAhead(order, 4)
    for seed, epoch in ((0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (1, 1), (1, 0), (1, 0)):
        assert orders(seed, epoch) == 10 * seed + epoch
    assert drawn[:4] == [(0, 0), (0, 1), (0, 2), (0, 3)] and len(drawn) == 7  # epoch 1 of seed 1 stayed
    assert orders(0, 2) == 2
    with pytest.raises(ValueError, match="no candidates"):
        orders(0, 3)
    assert _DrawnAhead(order, 1)(2, 0) == 20 and (2, 1) not in drawn
