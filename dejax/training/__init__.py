"""Training on relational graphs: the command `dejax-train`, which is `python -m dejax.training`, too.

* `Settings`: task, data set, model and hyperparameters. Defaults were published, or chosen on validation nodes
  (`resolve`).
* `Trainer`: one trainer for all tasks: nodes of a whole graph, nodes on mini-batches, links. A step is one compiled
  function of (state, data); several steps are one program, on mini-batches with reads and samples that overlap with
  layers (`dejax.minibatch.pipelined_steps`).
* `fit`: trains one seed, with early stopping and checkpoints, to a `Fitted`: its state and curves.
* `EntityClassifier`, `NodeMLP`: the models of whole graphs, as Flax nnx modules.
* `Checkpoints`: the states and curves of a run in its folder, by Orbax.
"""

from dejax.training.checkpoint import Checkpoints
from dejax.training.fitting import Fitted, fit
from dejax.training.settings import MODELS, Settings, resolve
from dejax.training.state import TrainState
from dejax.training.tasks.models import EntityClassifier, NodeMLP
from dejax.training.trainer import Trainer

__all__ = [
    "MODELS",
    "Checkpoints",
    "EntityClassifier",
    "Fitted",
    "NodeMLP",
    "Settings",
    "TrainState",
    "Trainer",
    "fit",
    "resolve",
]
