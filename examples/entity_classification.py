"""Entity classification on a relational graph, full batch, in one jitted step; the command behind `make demo`.

    python examples/entity_classification.py                                        # the standard library's code graph
    python examples/entity_classification.py --dataset aifb --data FOLDER           # the R-GCN paper's setting
    python examples/entity_classification.py --dataset aifb --model hgt --seeds 3
    python examples/entity_classification.py --evaluate out/aifb-rgcn

It ends with a table: accuracies (mean and spread over seeds, the most frequent class, a model without edges), time and
memory. It writes results, a plot of the curves and checkpoints. The model is in `dejax/training/tasks/models.py`, the
step in `dejax/training/trainer.py`. README.md in this folder explains settings and files.
"""

import sys

from dejax.training.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
