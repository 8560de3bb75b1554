"""Mini-batch training from the command line: `dejax-train --sampled`.

* `SampledSettings`: data set, layer, fan-outs and hyperparameters; `resolve` fills in defaults by data set.
* `SampledClassifier`: the model, on the blocks of a sample or on a full graph.
* `SampledTrainer`: one jitted step that samples, gathers rows, runs the layers and updates parameters and embeddings.
"""

from dejax.training.sampled.model import SampledClassifier
from dejax.training.sampled.settings import LAYERS, SampledSettings, resolve
from dejax.training.sampled.trainer import SampledState, SampledTrainer

__all__ = ["LAYERS", "SampledClassifier", "SampledSettings", "SampledState", "SampledTrainer", "resolve"]
