"""Link prediction from the command line: `examples/link_prediction.py`, `python -m dejax.training.links`.

* `LinkSettings`: data set, encoder, decoder and hyperparameters.
* `LinkGraph`: a `HeteroDataset` with nodes of all types in one list.
* `LinkTrainer`: one jitted step that samples, encodes, scores edges and negatives, and updates.
"""

from dejax.training.links.data import LinkGraph
from dejax.training.links.settings import DECODERS, LinkSettings, resolve
from dejax.training.links.trainer import LinkState, LinkTrainer

__all__ = ["DECODERS", "LinkGraph", "LinkSettings", "LinkState", "LinkTrainer", "resolve"]
