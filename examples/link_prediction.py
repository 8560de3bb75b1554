"""Link prediction on mini-batches: a relational encoder, a decoder, negatives, filtered MRR and Hits@k.

    python examples/link_prediction.py                                        # calls in the standard library's code
    python examples/link_prediction.py --data FOLDER --decoder complex        # train.txt, valid.txt, test.txt
    python examples/link_prediction.py --dataset synthetic-triples            # planted structure, FB15k-237's size
    python examples/link_prediction.py --resume                               # finish an interrupted run

This is `dejax-train --links`. `dejax/training/tasks/links.py` has the task: it draws negatives, samples the
neighbourhoods of all ends without the edges to predict, and scores. `dejax/training/trainer.py` has the step.
"""

import sys

from dejax.training.command import cli

if __name__ == "__main__":
    sys.exit(cli.main(["--links", *sys.argv[1:]]))
