"""MLPerf's R-GAT on IGB's heterogeneous graph, in mini-batches, with features and edges in host memory.

    python examples/igb_rgat.py                          # a small random graph: minutes on a CPU
    python examples/igb_rgat.py --scale 0.1 --batch 1024 --pipeline 32 --steps 1000 --device-gb 40   # on a GPU
    python examples/igb_rgat.py --data FOLDER --size medium --batch 1024 --pipeline 32 --steps 5000  # IGB's own files
    python examples/igb_rgat.py --resume --steps 40                        # go on; the same losses as without a pause

Without `--data` the graph is random with IGB's counts times `--scale`: it shows speed, and there is nothing to learn.
The model is in `dejax/training/igb/model.py`: three layers of 4 x 128 heads, each relation with its own softmax, 15, 10
and 5 neighbours a relation. A run writes OUT/results.json, OUT/curves.png and OUT/checkpoint.npz.
"""

import sys

from dejax.training.igb.cli import main

if __name__ == "__main__":
    sys.exit(main())
