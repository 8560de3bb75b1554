"""From a specification to a module of Flax: its arguments and its documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from dejax.rgnn.layers.spec import LayerSpec

FROM_CALL = ("in_features", "edge_features", "num_edge_types", "num_node_types", "num_nodes", "num_source_pairs")
"""Fields that a linen module takes from the arguments of its first call."""


def settings(spec: type[LayerSpec]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields that users of a module set, those without a default first; dtype and options are arguments of all."""
    fields = [field for field in dataclasses.fields(spec) if field.name not in ("dtype", "options")]
    return tuple(sorted(fields, key=_has_default))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING


def signature(spec: type[LayerSpec], common: inspect.Signature) -> inspect.Signature:
    """The signature of an nnx module: settings without a default by position, the others and `common` by keyword."""
    own = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY if _has_default(field) else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=field.default if _has_default(field) else inspect.Parameter.empty,
            annotation=field.type,
        )
        for field in settings(spec)
    ]
    shared = [p for p in common.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return inspect.Signature([*own, *shared])


def attributes(spec: type[LayerSpec]) -> dict[str, tuple[Any, Any]]:
    """The fields of a linen module and their defaults, `dataclasses.MISSING` for none; `features` is the width."""
    names = {"out_features": "features"}
    return {
        names.get(field.name, field.name): (field.type, field.default)
        for field in settings(spec)
        if field.name not in FROM_CALL
    }


_COMMON = """\
  dtype: dtype of the computation; None: the dtype to which x and the parameters promote.
  param_dtype: dtype of the parameters.
  backend: `"pallas"` for GPU kernels, `"xla"`, or `"auto"`, which takes kernels on a GPU.
  precision: precision of float32 matrix products: `"f32"`, `"tf32"`, `"bf16"`, or None (see `Options`).
  options: all compiler options (`Options`), in place of backend and precision.
  initializers: for some parameters, by name, a function `(key, shape, dtype) -> array`. By default matrices and
    attention vectors are Glorot uniform, HGT's `prior` and `skip` are ones, and biases are zeros."""
_OWN = {
    "nnx": "  rngs: random streams: `params` and, for a layer with dropout, `dropout`.",
    "linen": "  deterministic: True disables dropout; may be an argument of the call instead.",
}
"""What `RGCNConv` says about the arguments of all layers, and the other layers refer to."""


def documentation(spec: type[LayerSpec], flax: str) -> str:
    """The docstring of a module of `flax`, "nnx" or "linen": the specification's, with the arguments of all layers."""
    text, _, listed = (inspect.getdoc(spec) or "").partition("\n\nArgs:\n")
    if "  in_features: " not in listed:
        pair = "; a pair of widths if sources and destinations have features of their own" if spec.takes_pairs() else ""
        width = "width of the result."
        if "concat_heads" in {field.name for field in settings(spec)}:
            width = "width d of each head; the result has num_heads * d features, or d with concat_heads=False."
        listed = f"  in_features: width of the node features{pair}.\n  out_features: {width}\n{listed}"
    if flax == "linen":
        listed = _without(FROM_CALL, listed)
        text, listed = (part.replace("out_features", "features") for part in (text, listed))
    names = [*re.findall(r"^  (\w+): ", f"{_COMMON}\n{_OWN[flax]}", re.MULTILINE)]
    common = f"{_COMMON}\n{_OWN[flax]}" if spec.name == "RGCNConv" else f"  {', '.join(names)}: as in `RGCNConv`."
    raises = "" if flax == "linen" else "Raises:\n  ValueError: the sizes do not fit each other.\n\n"
    heading = "Attributes" if flax == "linen" else "Args"
    return f"{text}\n\n{heading}:\n{listed.rstrip()}\n{common}\n\n{raises}{example(spec, flax)}\n"


def _without(names: tuple[str, ...], listed: str) -> str:
    """A list of arguments without some of them; an entry may have several names."""

    def kept(entry: re.Match[str]) -> str:
        own = [name for name in entry[1].split(", ") if name not in names]
        return f"  {', '.join(own)}: {entry[2]}" if own else ""

    return re.sub(r"^  ((?:\w+, )*\w+): (.*\n(?:    .*\n)*)", kept, f"{listed.rstrip()}\n", flags=re.MULTILINE)


_SIZES = {
    "in_features": 4,
    "out_features": 4,
    "num_node_types": 1,
    "num_edge_types": 2,
    "edge_features": 3,
    "mean_log_degree": 1.0,
}
"""Arguments of the layers in the docstrings' examples, whose graph has three nodes and two edges."""


def example(spec: type[LayerSpec], flax: str) -> str:
    """A doctest that makes a layer of a specification and calls it."""
    needed = [field.name for field in settings(spec) if not _has_default(field)]
    edges = ", jnp.ones((2, 3))" if "edge_features" in needed else ""
    graph = "graph = RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)"
    call = f"graph, jnp.ones((3, 4)){edges}"
    if flax == "linen":
        given = ", ".join(
            str(_SIZES[name]) if name == "out_features" else f"{name}={_SIZES[name]}"
            for name in needed
            if name not in FROM_CALL
        )
        lines = [
            "import jax, jax.numpy as jnp",
            "from dejax.rgnn import RelGraph",
            f"from dejax.rgnn.linen import {spec.name}",
            graph,
            f"y, variables = {spec.name}({given}).init_with_output(jax.random.key(0), {call})",
            "y.shape",
        ]
    else:
        given = ", ".join(str(_SIZES[name]) for name in needed)
        lines = [
            "import jax.numpy as jnp",
            "from flax import nnx",
            "from dejax.rgnn import RelGraph",
            f"from dejax.rgnn.nnx import {spec.name}",
            graph,
            f"layer = {spec.name}({given}, rngs=nnx.Rngs(0))",
            f"layer({call}).shape",
        ]
    return "\n".join([*(f">>> {line}" for line in lines), "(3, 4)"])
