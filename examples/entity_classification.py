"""Entity classification on a relational graph, full batch, in one jitted step; the command behind `make demo`.

    python examples/entity_classification.py                                        # the standard library's code graph
    python examples/entity_classification.py --dataset aifb --data FOLDER           # the R-GCN paper's setting
    python examples/entity_classification.py --dataset aifb --model hgt --seeds 3
    python examples/entity_classification.py --evaluate out/aifb-rgcn

Ends with a table of accuracies (mean and spread over seeds, beside the most frequent class and a model without edges),
time and memory, and writes results, a plot of the curves and checkpoints. The model and the step are in
`dejax/training/models.py` and `dejax/training/fit.py`, short enough to read; see README.md in this folder.
"""

import sys

from dejax.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
