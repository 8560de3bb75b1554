"""The settings of a run. Defaults were published, chosen on validation nodes, or are starting points."""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass
from typing import Any

MODELS = ("rgcn", "rgat", "hgt", "sage")
"""The names of the relational models.

Three further names are accepted: "mlp", the baseline without edges, for the task "nodes"; "embeddings", a decoder on
node embeddings without layers, for the task "links"; and "relgt", attention of a seed over its sampled tree, for the
task "tables".
"""
TASKS = ("nodes", "samples", "links", "tables")
NUMBERS = ("standard", "piecewise", "periodic")
CLASS_WEIGHTS = ("none", "balanced")
SCHEDULES = ("constant", "cosine", "linear")
DECODERS = ("distmult", "complex", "rotate", "dot")
NEGATIVES = ("uniform", "degree", "in_batch", "all")
LOSSES = ("softmax", "binary")
PLACES = ("host", "device", "split")
PRECISIONS = ("f32", "tf32", "bf16")
FEATURE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")
ENTITY = ("stdlib", "aifb", "mutag", "bgs", "am")
"""Graphs of one list of nodes and many relations. Their fan-outs are over all relations, unless nodes keep types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a training run: all that decides its results, except the files of the data and the machine.

    Attributes that only some tasks read begin with the names of these tasks.

    Attributes:
        dataset: a name that `dejax.training.tasks.data.load` knows, or the name of a saved HeteroDataset.
        task: "nodes": nodes are classified, and a step sees the whole graph. "samples": nodes are classified on
            mini-batches. "links": edges are predicted on mini-batches. "tables": labels of rows of a database are
            predicted.
        model: one of `MODELS`, or "mlp", "embeddings" or "relgt".
        hidden: width of the hidden layers, all heads together.
        layers: number of relational layers (for "mlp": dense layers); on mini-batches the number of fan-outs.
        heads: number of attention heads of rgat, hgt and relgt; must divide `hidden`.
        bases: number of basis matrices of rgcn; None for one matrix for each relation.
        dropout: rgcn: share of the edges that are dropped, and half of this share of the self loops (0.4 and 0.2 in
            the paper). rgat: share of the attention coefficients that are dropped. hgt: share of the elements of a
            layer's result; sage: of a layer's input; task "links": of the encoder's result.
        epochs: number of passes over the training data. For the task "nodes" an epoch is one step.
        seeds: number of runs, with the seeds 0 to seeds - 1.
        lr: learning rate of Adam, also for embeddings.
        schedule: how the learning rate of the parameters changes over the steps of the run, one of `SCHEDULES`:
            "cosine" and "linear" end at 0. Embeddings keep `lr`.
        warmup: number of steps in which the learning rate of the parameters rises from 0 to `lr`; with a schedule that
            falls, an eighth of all steps at most.
        clip: largest global norm of the gradients of parameters; larger gradients are scaled down to it. 0: no limit.
        patience: early stopping: number of evaluations without a better validation measure after which a seed stops;
            its results are then those of its best evaluation. 0: all epochs, and the results of the last one.
        precision: precision of products of float32 matrices, one of `PRECISIONS`; None as in `dejax.rgnn.Options`.
        eval_every: number of epochs between two points of the curves.
        pipeline: samples, links: number of steps in one program, whose reads and samples overlap with layers. None: 16
            on a GPU, 1 elsewhere. The results do not depend on it.
        l2: nodes: weight in the loss of the sum of squares of the first layer's matrices.
        featureless: nodes: whether to ignore the features of the data set.
        holdout: nodes: share of the training nodes that is held out for validation, so that settings can be chosen
            without the test nodes.
        fold: nodes: number of the share that is held out, for cross-validation.
        fan_outs: samples, links: for each layer the number of neighbours of a node that are drawn, beginning with the
            seeds; -1 for all. From each relation (samples), or from all relations together (links, or `joint`).
        batch_size: samples, links: number of seeds, or of training edges, in a step.
        full_batch: samples, links: whether a step sees the whole graph instead of samples.
        joint: samples: whether fan-outs count over all relations together; for graphs with one node type and many
            relations.
        typed_nodes: samples: whether nodes of stdlib and of RDF graphs keep their types.
        reverse: samples: whether the reverse of each relation is added.
        parts: samples: number of parts in which a step samples its seeds, each with a key of its own; a multiple of the
            number of devices. The results depend on it, but not on the number of devices.
        weight_decay: samples: decoupled weight decay of Adam, for parameters.
        place: samples: where features lie: "host", "device" or "split" (the most used rows on the device).
        device_bytes: samples: with "split", number of bytes of features on the device.
        feature_dtype: samples: dtype of the feature tables; None for the dtype of the data.
        offload: samples: whether activations lie in host memory between forward and backward pass.
        sigmas: samples: array sizes for samples, as a number of standard deviations above the mean sample.
        decoder: links: one of `DECODERS`.
        negatives: links: number of wrong ends for each edge; every second edge gets wrong senders in place of wrong
            receivers. tables, link tasks: number of wrong candidates that are drawn for each link.
        negative_kind: links: how wrong ends are drawn among nodes of the right type: "uniform"; "degree", in proportion
            to the number of training edges; "in_batch", the ends of the other edges of the batch; "all", every other
            node of the type, which needs a step that sees the whole graph (`full_batch`, or the model "embeddings").
        loss: links: "softmax", each edge against its negatives; or "binary".
        reciprocal: links: whether each relation has a second vector, with which heads are predicted (arXiv 1806.07297).
        n3: links: weight in the loss of the sum of cubes of an edge's vectors, the nuclear 3-norm of arXiv 1806.07297.
        margin: links: the margin of the decoder rotate, from which the distance is subtracted.
        eval_edges: links: number of validation edges in an evaluation; 0: all.
        target: tables: name of the task; None if there is only one.
        recent: tables: whether fan-outs take the latest edges before the cutoff instead of uniform draws.
        numbers: tables: encoding of numbers, one of `NUMBERS` (`dejax.training.tables.encoders`).
        bins: tables: number of quantiles of the encoding "piecewise".
        class_weights: tables: "none"; or "balanced": a class counts in inverse proportion to its training examples.
        eval_rows: tables: number of validation examples in an evaluation; 0: all.
        top: tables, link tasks: number of candidates that are listed for each example; the k of MAP@k and recall@k.

    Raises:
        ValueError: a value is out of range.

    >>> from dejax.training import Settings
    >>> settings = Settings(dataset="stdlib", model="rgat", heads=4)
    >>> settings.hidden, settings.replace(hidden=32).hidden
    (16, 32)
    """

    dataset: str
    task: str = "nodes"
    model: str = "rgcn"
    hidden: int = 16
    layers: int = 2
    heads: int = 1
    bases: int | None = None
    dropout: float = 0.0
    epochs: int = 50
    seeds: int = 10
    lr: float = 0.01
    schedule: str = "constant"
    warmup: int = 0
    clip: float = 0.0
    patience: int = 0
    precision: str | None = None
    eval_every: int = 5
    pipeline: int | None = None
    l2: float = 0.0
    featureless: bool = False
    holdout: float = 0.0
    fold: int = 0
    fan_outs: tuple[int, ...] = ()
    batch_size: int = 1024
    full_batch: bool = False
    joint: bool = False
    typed_nodes: bool = False
    reverse: bool = True
    parts: int = 1
    weight_decay: float = 0.0
    place: str = "host"
    device_bytes: int = 1 << 30
    feature_dtype: str | None = None
    offload: bool = False
    sigmas: float = 5.0
    decoder: str = "distmult"
    negatives: int = 128
    negative_kind: str = "uniform"
    loss: str = "softmax"
    reciprocal: bool = False
    n3: float = 0.0
    margin: float = 6.0
    eval_edges: int = 1000
    target: str | None = None
    recent: bool = True
    numbers: str = "standard"
    bins: int = 16
    class_weights: str = "none"
    eval_rows: int = 0
    top: int = 10

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "fan_outs", tuple(self.fan_outs))
        if self.task != "nodes":
            object.__setattr__(self, "layers", len(self.fan_outs))
        self._check_choices()
        self._check_ranges()
        if self.model in ("rgat", "hgt", "relgt") and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got heads={self.heads}, hidden={self.hidden}")
        if self.task == "links" and self.decoder in ("complex", "rotate") and self.hidden % 2:
            raise ValueError(f"hidden must be even for {self.decoder}, got {self.hidden}")

    def _check_choices(self) -> None:
        models = {
            "nodes": ("rgcn", "rgat", "hgt", "mlp"),
            "links": ("rgcn", "rgat", "sage", "embeddings"),
            "tables": (*MODELS, "relgt"),
        }
        choices: dict[str, tuple[Any, ...]] = {
            "task": TASKS,
            "model": models.get(self.task, MODELS),
            "precision": (None, *PRECISIONS),
            "place": PLACES,
            "feature_dtype": (None, *FEATURE_DTYPES),
            "decoder": DECODERS,
            "negative_kind": NEGATIVES,
            "loss": LOSSES,
            "schedule": SCHEDULES,
            "numbers": NUMBERS,
            "class_weights": CLASS_WEIGHTS,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind in _TYPES and not isinstance(value, _TYPES[kind][0]):
                raise ValueError(f"{field.name} must be {_TYPES[kind][1]}, got {value!r}")
        if not isinstance(self.fan_outs, list | tuple) or not all(
            isinstance(k, numbers.Integral) for k in self.fan_outs
        ):
            raise ValueError(f"fan_outs must be whole numbers, one for each layer, got {self.fan_outs!r}")

    def _check_ranges(self) -> None:
        if self.model == "embeddings":
            if self.fan_outs:
                raise ValueError(f"fan_outs must be left out with the model 'embeddings', got {self.fan_outs}")
        elif self.task != "nodes" and (not self.fan_outs or any(k < -1 or k == 0 for k in self.fan_outs)):
            raise ValueError(f"fan_outs must be numbers from 1, or -1 for all, one for each layer, got {self.fan_outs}")
        for least, names in _LEAST.items():
            for name in names:
                if name == "layers" and self.model == "embeddings":
                    continue
                if getattr(self, name) is not None and getattr(self, name) < least:
                    hint = ", or 0 on the command line for none" if name == "bases" else ""
                    raise ValueError(f"{name} must be at least {least}{hint}, got {getattr(self, name)}")
        for name in ("dropout", "holdout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be a share in [0, 1), got {getattr(self, name)}")
        if self.negative_kind == "all" and not (self.full_batch or self.model == "embeddings"):
            raise ValueError(
                "negative_kind must be another than 'all' unless full_batch is True or the model is 'embeddings', "
                "whose steps see all nodes, got 'all'"
            )
        if self.reciprocal and self.decoder == "dot":
            raise ValueError("reciprocal must be False with the decoder 'dot', which has no relations, got True")
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")

    def replace(self, **changes: Any) -> Settings:
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "fan_outs": list(self.fan_outs)}


_TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
}
_LEAST: dict[int, tuple[str, ...]] = {
    1: (
        *("hidden", "layers", "heads", "bases", "seeds", "eval_every", "pipeline", "batch_size", "parts", "negatives"),
        *("bins", "top"),
    ),
    0: (
        *("epochs", "fold", "l2", "weight_decay", "device_bytes", "sigmas", "eval_edges", "warmup", "clip", "patience"),
        *("eval_rows", "n3"),
    ),
}
_OF_TASK = {
    "nodes": ("l2", "featureless", "holdout", "fold", "layers"),
    "samples": (
        *("fan_outs", "batch_size", "full_batch", "pipeline", "joint", "typed_nodes", "reverse", "parts"),
        *("weight_decay", "place", "device_bytes", "feature_dtype", "offload", "sigmas"),
    ),
    "links": (
        *("fan_outs", "batch_size", "full_batch", "pipeline", "decoder", "negatives", "negative_kind", "loss"),
        *("reciprocal", "n3", "margin", "eval_edges"),
    ),
    "tables": (
        *("fan_outs", "batch_size", "pipeline", "parts", "weight_decay", "place", "offload", "sigmas"),
        *("target", "recent", "numbers", "bins", "class_weights", "eval_rows", "top", "negatives"),
    ),
}


def tasks_of(name: str) -> tuple[str, ...]:
    """The tasks that read a setting."""
    found = tuple(task for task, names in _OF_TASK.items() if name in names)
    return found or TASKS


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
# Starting points. They were not tuned on validation nodes; examples/README.md has the accuracies that were measured.
_SAMPLES: dict[str, Any] = {"fan_outs": (10, 10), "hidden": 64, "heads": 4, "epochs": 10, "seeds": 1, "eval_every": 1}
_OF_SAMPLES: dict[str, dict[str, Any]] = {
    "stdlib": {"batch_size": 1024, "bases": 8, "dropout": 0.4, "epochs": 40},
    "aifb": {"batch_size": 64, "hidden": 16, "epochs": 20, "seeds": 10},
}
# Chosen on the validation months of the flights of docs/tables.md. There a seed is an event, with one edge of each
# relation, and the first fan-out changes nothing; an entity such as a customer needs its latest rows.
_TABLES: dict[str, Any] = {
    **_SAMPLES,
    "fan_outs": (16, 16),
    "batch_size": 512,
    "lr": 0.003,
    "clip": 1.0,
    "schedule": "cosine",
    "warmup": 50,
    "epochs": 2,
    "patience": 3,
    "numbers": "piecewise",
    "negatives": 4,
}
_LINKS = {**_SAMPLES, "fan_outs": (20, 10), "bases": 8, "dropout": 0.2, "lr": 0.005, "eval_every": 2}
# Lacroix et al. (arXiv 1806.07297): every entity as a negative, reciprocal relations, the nuclear 3-norm. Width, rate
# and weight were chosen on the validation triples of UMLS and Kinships.
_EMBEDDINGS: dict[str, Any] = {
    "hidden": 256,
    "lr": 0.01,
    "epochs": 60,
    "batch_size": 512,
    "seeds": 1,
    "eval_every": 5,
    "negative_kind": "all",
    "n3": 0.01,
    "decoder": "complex",
}


def resolve(
    dataset: str, model: str = "rgcn", *, task: str = "nodes", examples: int | None = None, **given: Any
) -> Settings:
    """Makes the settings of a run: given values, and defaults that depend on task, data set and model for all others.

    Args:
        dataset: name of the data set.
        model: one of `MODELS`, or "mlp", "embeddings" or "relgt".
        task: one of `TASKS`.
        examples: tables: number of training examples (for a link task, of links), on which the defaults of batch size
            and epochs depend; None takes the defaults for many examples.
        given: fields of `Settings`; None means the default.

    Raises:
        ValueError: a value is out of range.
        TypeError: a name is no field of `Settings`.

    >>> resolve("mutag").bases, resolve("mutag", bases=4).bases
    (30, 4)
    >>> resolve("stdlib", task="samples", fan_outs=(5, -1)).fan_outs
    (5, -1)
    >>> few = resolve("shop", task="tables", examples=2000)
    >>> few.batch_size, few.epochs
    (32, 8)
    """
    of_task = {"samples": _samples, "links": _links, "tables": lambda *_: _tables(examples)}
    preset = of_task.get(task, _nodes)(dataset, model, given)
    preset.update({name: value for name, value in given.items() if value is not None})
    if preset.get("bases") == 0:
        preset["bases"] = None
    return Settings(dataset=dataset, model=model, task=task, **preset)


def _nodes(dataset: str, model: str, given: dict[str, Any]) -> dict[str, Any]:
    preset = dict(_ATTENTION) if model in ("rgat", "hgt") else dict(_RGCN.get(dataset, {})) if model == "rgcn" else {}
    return {**preset, **_CHOSEN.get((dataset, model), {})}


def _links(dataset: str, model: str, given: dict[str, Any]) -> dict[str, Any]:
    if model != "embeddings":
        return dict(_LINKS)
    return {**_EMBEDDINGS, "reciprocal": given.get("decoder") != "dot"}


def _tables(examples: int | None) -> dict[str, Any]:
    """The defaults of tables: of few examples smaller batches, and epochs for some hundreds of steps."""
    if examples is None:
        return dict(_TABLES)
    batch = min(_TABLES["batch_size"], max(32, 1 << (max(1, examples // 32).bit_length() - 1)))
    epochs = min(20, max(_TABLES["epochs"], -(-500 * batch // max(1, examples))))
    return {**_TABLES, "batch_size": batch, "epochs": epochs}


def _samples(dataset: str, model: str, given: dict[str, Any]) -> dict[str, Any]:
    typed = bool(given.get("typed_nodes") or model == "hgt")
    joint = dataset in ENTITY and not typed
    preset = {**_SAMPLES, "typed_nodes": typed, "joint": joint, **_OF_SAMPLES.get(dataset, {})}
    if joint:
        preset["fan_outs"] = (20, 20)
    if model != "rgcn":
        preset.pop("bases", None)
    return preset
