"""The data of a run, and its training, validation and test nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from dejax import datasets
from dejax.datasets import EntityDataset

SPLITS = ("train", "valid", "test")
# Synthetic graphs have neither features nor a task. A run on one measures time; its accuracy is that of guessing.
_SYNTHETIC = "synthetic-"
_SYNTHETIC_TASK = {"feature_width": 64, "num_classes": 8}


def load_data(name: str, folder: str | None = None) -> EntityDataset:
    """`dejax.datasets.load`; a synthetic graph gets random features and labels, so that a step can be measured.

    Args:
        name: one of `dejax.datasets.NAMES`.
        folder: the folder of its files.
    """
    options: dict[str, Any] = _SYNTHETIC_TASK if name.startswith(_SYNTHETIC) else {}
    return datasets.load(name, folder, **options)


def needs_reverse(data: EntityDataset) -> bool:
    """Whether to add reverse relations. The published counts of the synthetic graphs include them already."""
    return not data.name.startswith(_SYNTHETIC)


def split_nodes(data: EntityDataset, holdout: float = 0.0, fold: int = 0) -> dict[str, np.ndarray]:
    """The nodes of each split, with a share of the training nodes moved to validation.

    Args:
        data: the data set.
        holdout: the share. The same nodes are drawn each time, so that seeds and settings see the same nodes.
        fold: the number of the share, for cross-validation; shares 0, 1, .. are disjoint.

    Raises:
        ValueError: the data set has a validation split, no training node is left, or there is no such fold.
    """
    splits = {name: getattr(data, f"{name}_nodes") for name in SPLITS}
    if not holdout:
        return splits
    if len(splits["valid"]):
        raise ValueError(f"holdout must be 0 for {data.name!r}, which has a validation split; got {holdout}")
    shuffled = np.random.default_rng(0).permutation(splits["train"])
    count = max(1, round(holdout * len(shuffled)))
    if count >= len(shuffled):
        raise ValueError(f"holdout={holdout} leaves none of the {len(shuffled)} training nodes; take a smaller share")
    start = fold * count
    if start + count > len(shuffled):
        raise ValueError(f"fold must be less than {len(shuffled) // count} with holdout={holdout}, got {fold}")
    train = np.concatenate([shuffled[:start], shuffled[start + count :]])
    return {"train": train, "valid": shuffled[start : start + count], "test": splits["test"]}
