"""The settings of a run. Defaults were published, or chosen on validation nodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

MODELS = ("rgcn", "rgat", "hgt")
"""The relational models. `"mlp"`, the baseline without edges, is accepted, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides the results of a run, except the data's files and the machine.

    Attributes:
        dataset: a name of `dejax.datasets.NAMES`.
        model: one of `MODELS`, or "mlp".
        hidden: width of the hidden layers, all heads together.
        layers: relational layers (for "mlp": dense layers).
        heads: attention heads of RGAT and HGT; must divide `hidden`.
        bases: basis matrices of R-GCN's weights; None for one matrix per relation.
        epochs: number of steps; each step sees the whole graph.
        seeds: number of runs, with seeds 0 .. seeds - 1.
        lr: Adam's learning rate.
        l2: weight of the sum of squares of the first layer's matrices in the loss.
        dropout: R-GCN: the share of dropped edges, and half of that for self loops (the paper's 0.4 and 0.2). RGAT: the
            share of dropped attention coefficients. HGT: the share of a layer's result.
        featureless: ignore the data set's features.
        holdout: share of the training nodes held out for validation, so that settings can be chosen without the test
            nodes.
        fold: number of the share that is held out, for cross-validation.
        precision: precision of products of float32 matrices: "f32", "tf32", "bf16"; None as in `dejax.rgnn.Options`.
        eval_every: epochs between two points of the accuracy curves, and between two updates of the progress bar.

    Raises:
        ValueError: a value out of range.

    >>> from dejax.training import Settings
    >>> settings = Settings(dataset="stdlib", model="rgat", heads=4)
    >>> settings.hidden, settings.replace(hidden=32).hidden
    (16, 32)
    """

    dataset: str
    model: str = "rgcn"
    hidden: int = 16
    layers: int = 2
    heads: int = 1
    bases: int | None = None
    epochs: int = 50
    seeds: int = 10
    lr: float = 0.01
    l2: float = 0.0
    dropout: float = 0.0
    featureless: bool = False
    holdout: float = 0.0
    fold: int = 0
    precision: str | None = None
    eval_every: int = 5

    def __post_init__(self) -> None:
        if self.model not in (*MODELS, "mlp"):
            raise ValueError(f"model must be one of {', '.join(MODELS)} or mlp, got {self.model!r}")
        for name in ("hidden", "layers", "heads", "seeds", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.bases is not None and self.bases < 1:
            raise ValueError(f"bases must be at least 1, or 0 on the command line for none, got {self.bases}")
        for name in ("epochs", "fold"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("dropout", "holdout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be a share in [0, 1), got {getattr(self, name)}")
        if self.lr <= 0 or self.l2 < 0:
            raise ValueError(f"lr must be positive and l2 not negative, got lr={self.lr}, l2={self.l2}")
        if self.model in ("rgat", "hgt") and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got heads={self.heads}, hidden={self.hidden}")

    def replace(self, **changes: Any) -> Settings:
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


# Schlichtkrull et al. (arXiv 1703.06103), section 5.1 and the table of its appendix: Adam with 0.01, 50 epochs, 16
# hidden units (10 for AM), bases and the penalty on the first layer by data set.
_RGCN: dict[str, dict[str, Any]] = {
    "aifb": {},
    "mutag": {"bases": 30, "l2": 5e-4},
    "bgs": {"bases": 40, "l2": 5e-4},
    "am": {"bases": 40, "l2": 5e-4, "hidden": 10},
}
# Chosen on validation nodes, on AIFB by cross-validation on its training nodes; the tables are in examples/README.md.
_CHOSEN: dict[tuple[str, str], dict[str, Any]] = {
    ("aifb", "rgat"): {"hidden": 16, "dropout": 0.5},
    ("aifb", "hgt"): {"l2": 5e-4},
    ("stdlib", "rgcn"): {"hidden": 64, "bases": 8, "dropout": 0.4, "epochs": 60, "seeds": 5},
}
_ATTENTION: dict[str, Any] = {"hidden": 32, "heads": 4}


def resolve(dataset: str, model: str = "rgcn", **given: Any) -> Settings:
    """The settings of a run: the given values; the others were published, or chosen on validation nodes.

    Args:
        dataset: a name of `dejax.datasets.NAMES`.
        model: one of `MODELS`, or "mlp".
        given: fields of `Settings`; None stands for a value that is not given.

    Raises:
        ValueError: a value out of range.
        TypeError: not a field of `Settings`.

    >>> resolve("mutag").bases, resolve("mutag", bases=4).bases
    (30, 4)
    """
    preset = dict(_ATTENTION) if model in ("rgat", "hgt") else dict(_RGCN.get(dataset, {})) if model == "rgcn" else {}
    preset.update(_CHOSEN.get((dataset, model), {}))
    preset.update({name: value for name, value in given.items() if value is not None})
    if preset.get("bases") == 0:
        preset["bases"] = None
    return Settings(dataset=dataset, model=model, **preset)
