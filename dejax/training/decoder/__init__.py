"""A decoder-only language model, and its training: `examples/train_gpt.py` is the command.

* `DecoderConfig`, `SIZES`: shapes of the model, 125 million to 27 billion parameters.
* `model`: the layers as functions of plain pytrees: rotary embeddings, grouped-query attention, SwiGLU, RMSNorm.
* `text`: bytes of a folder or of the standard library, in random windows.
* `Recipe`, `make_trainer`: the step: schedule, accumulation, offload, meshes.
* `generate`: samples text with a cache of keys and values.
"""

from dejax.training.decoder.config import SIZES, DecoderConfig
from dejax.training.decoder.model import forward, init_params, loss
from dejax.training.decoder.sampling import generate
from dejax.training.decoder.step import Recipe, Trainer, make_trainer

__all__ = ["SIZES", "DecoderConfig", "Recipe", "Trainer", "forward", "generate", "init_params", "loss", "make_trainer"]
