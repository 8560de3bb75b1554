"""`dejax-train --sampled --mesh N`: the numbers of one device with the same parts, and resume on another number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.training import cli
from dejax.training.sampled import resolve
from dejax.training.sampled.mesh import MeshTrainer
from tests.training.sampled.test_sampled_training import community_graph, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data") / "communities"
    community_graph().save(place)
    return place


TINY = {"hidden": 4, "batch_size": 8, "fan_outs": (3,), "lr": 0.05, "parts": 2}


def trained(devices, steps, state=None):
    trainer = MeshTrainer(resolve("communities", "sage", **TINY), community_graph(), devices=devices)
    state = trainer.init(0) if state is None else trainer.imported(state, 0)
    for _ in range(steps):
        state = trainer._compiled(state, None)(state, None, {k: jnp.asarray(x) for k, x in trainer.order(0, 0).items()})
    return trainer, state


@pytest.mark.devices(2)
@pytest.mark.full
def test_two_devices_have_the_numbers_of_one_and_go_on_on_one():
    trainer, two = trained(2, 3)
    exported = jax.tree.map(np.array, trainer.exported(two))
    one_trainer, one = trained(1, 3)
    want = one_trainer.exported(one)
    assert int(want["step"]) == 3 and want["loss"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), exported, want)
    _, again = trained(1, 1, exported)
    _, further = trained(1, 4)
    np.testing.assert_allclose(again.loss, further.loss, rtol=0, atol=1e-5)
    assert trainer.sampled_accuracy(two, ["valid"]) == one_trainer.sampled_accuracy(one, ["valid"])


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--mesh", "4", "--parts", "6"], "--parts must be a multiple of --mesh, 4, got 6"),
        (["--mesh", "2", "--full-batch"], "--mesh must not stand with --full-batch"),
        (["--mesh", "99"], "`devices` must be 1 to"),
    ],
)
def test_mistakes(folder, tmp_path, capsys, wrong, message):
    assert cli.main(words(folder, tmp_path / "out", *wrong)) == 2
    assert message in capsys.readouterr().err
