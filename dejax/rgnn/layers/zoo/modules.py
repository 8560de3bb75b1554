"""From a specification to a module of Flax: its arguments and its documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from dejax.rgnn.layers.zoo.spec import FROM_CALL, ZooSpec


def settings(spec: type[ZooSpec]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields that users of a module set, those without a default first; dtype and options are arguments of all."""
    fields = [field for field in dataclasses.fields(spec) if field.name not in ("dtype", "options")]
    return tuple(sorted(fields, key=_has_default))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING


def signature(spec: type[ZooSpec], common: inspect.Signature) -> inspect.Signature:
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


def attributes(spec: type[ZooSpec]) -> dict[str, tuple[Any, Any]]:
    """The fields of a linen module and their defaults, `dataclasses.MISSING` for none; `features` is the width."""
    names = {"out_features": "features"}
    return {
        names.get(field.name, field.name): (field.type, field.default)
        for field in settings(spec)
        if field.name not in FROM_CALL
    }


def documentation(spec: type[ZooSpec], of_linen: bool) -> str:
    """The docstring of a module: that of the specification, with the arguments that all layers have."""
    text = inspect.getdoc(spec) or ""
    text, _, listed = text.partition("\n\nArgs:\n")
    if of_linen:
        # Widths and counts come from the first call.
        listed = re.sub(rf"^  ({'|'.join(FROM_CALL)}): .*\n(?:    .*\n)*", "", f"{listed}\n", flags=re.MULTILINE)
        text = text.replace("out_features", "features")
        listed = f"  features: width of the result.\n{listed.rstrip()}"
        common = "  deterministic, dtype, param_dtype, backend, precision, options, initializers: as in `RGCNConv`."
        return f"{text}\n\nAttributes:\n{listed}\n{common}\n\n{example(spec, of_linen)}\n"
    pair = "; a pair (sources, destinations) for two inputs" if spec.pairs else ""
    listed = f"  in_features: width of the node features{pair}.\n  out_features: width of the result.\n{listed}"
    common = "  dtype, param_dtype, backend, precision, options, initializers, rngs: as in `RGCNConv`."
    raises = "Raises:\n  ValueError: sizes that do not fit each other."
    return f"{text}\n\nArgs:\n{listed}\n{common}\n\n{raises}\n\n{example(spec, of_linen)}\n"


_SIZES = {
    "in_features": 4,
    "out_features": 4,
    "num_node_types": 1,
    "num_edge_types": 2,
    "edge_features": 3,
    "mean_log_degree": 1.0,
}
"""Of the layers in examples, whose graph has three nodes and two edges."""


def example(spec: type[ZooSpec], of_linen: bool) -> str:
    """A doctest that makes a layer of a specification and calls it."""
    needed = [field.name for field in settings(spec) if not _has_default(field)]
    edges = ", jnp.ones((2, 3))" if "edge_features" in needed else ""
    graph = "graph = RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)"
    call = f"graph, jnp.ones((3, 4)){edges}"
    if of_linen:
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
