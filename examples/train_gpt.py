"""Train a GPT on text as bytes; flags put its activations, parameters and moments in host memory.

    python examples/train_gpt.py                                     # a small model, a few minutes on a CPU
    python examples/train_gpt.py --text FOLDER --steps 2000          # your own text
    python examples/train_gpt.py --sample "def " --length 300        # text from the last checkpoint
    python examples/train_gpt.py --offload inputs --out out/inputs   # blocks' inputs in host memory
    python examples/train_gpt.py --offload all --out out/disk --store DIR --host-bytes 1000000000  # the rest on disk
    python examples/train_gpt.py --size 12b --state moments --batch 8 --sequence 4096 --checkpoint 0   # one H200
    python examples/train_gpt.py --mesh 4                            # FSDP over four devices
    python examples/train_gpt.py --compare inputs --out out/compare  # with and without: the same losses, one plot

The model is a decoder as language models have them now: rotary embeddings, grouped-query attention, SwiGLU, RMSNorm,
bfloat16 arithmetic with float32 parameters. Its code is in `dejax/training/decoder/`. A run writes OUT/losses.json,
OUT/loss.svg, OUT/settings.json and checkpoints. `--resume` continues from the last checkpoint with the same batches;
without it a run replaces the earlier one in OUT. `docs/large_models.md` says which flags a large model needs.
"""

import sys

from dejax.training.decoder.cli import main

if __name__ == "__main__":
    sys.exit(main())
