"""Link prediction on mini-batches: a relational encoder, a decoder, negatives, filtered MRR and Hits@k.

    python examples/link_prediction.py                                        # calls in the standard library's code
    python examples/link_prediction.py --data FOLDER --decoder complex        # train.txt, valid.txt, test.txt
    python examples/link_prediction.py --dataset synthetic-triples            # planted structure, FB15k-237's size
    python examples/link_prediction.py --resume                               # finish an interrupted run

The step is `LinkTrainer.step` in dejax/training/links/trainer.py: it draws negatives, samples the neighbourhoods of all
ends without the edges to predict, reads features or embeddings, runs the layers, scores and updates.
"""

import sys

from dejax.training.links.cli import main

if __name__ == "__main__":
    sys.exit(main())
