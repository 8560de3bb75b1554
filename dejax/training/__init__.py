"""Entity classification from the command line: `dejax-train`, `python -m dejax.training` or `examples/`.

* `Settings`: data set, model and hyperparameters. Defaults were published, or chosen on validation nodes (`resolve`).
* `EntityClassifier`, `NodeMLP`: the models, as Flax nnx modules.
* `Trainer`: full-batch training of one model on one data set, one jitted step, one seed after another.
* `Checkpoints`: the state and the curves of a run in its folder, by Orbax.
"""

from dejax.training.checkpoint import Checkpoints
from dejax.training.fit import Trainer, TrainState
from dejax.training.models import EntityClassifier, NodeMLP
from dejax.training.settings import MODELS, Settings, resolve

__all__ = ["MODELS", "Checkpoints", "EntityClassifier", "NodeMLP", "Settings", "TrainState", "Trainer", "resolve"]
