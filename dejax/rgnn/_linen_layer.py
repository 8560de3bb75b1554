"""Modules of Flax linen: what all layers share, and a module of any program."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dejax._optional import optional
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import modules, parameters
from dejax.rgnn.layers.parameters import Initializer
from dejax.rgnn.layers.spec import LayerSpec
from dejax.rgnn.options import Options

with optional("flax", of="dejax.rgnn.linen"):
    from flax import linen as nn


class ProgramModule(nn.Module):
    """Wraps a relational program (`@rgnn.program`) as a linen module that holds some arguments as parameters.

    Attributes:
      program: a program, called as `program(graph, *inputs, **parameters)`.
      params: for each argument of the program that becomes a parameter, by its name: a pair (shape, initialiser).
      dtype, param_dtype, backend, precision, options: as in `RGCNConv`.
    """

    returns_destinations: ClassVar[bool] = True

    program: Callable[..., Any]
    params: Mapping[str, tuple[tuple[int, ...], Initializer]]
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    backend: str = "auto"
    precision: str | None = None
    options: Options | None = None

    @nn.compact
    def __call__(self, graph: RelGraph, *inputs: Any) -> Any:
        """What the program gives for `inputs`, its arguments that are no parameters, in order."""
        choices = (self.backend, self.precision, self.options)
        spec = parameters.ProgramSpec.make(self.program, self.params, self.dtype, *choices)
        params = {n: self.param(n, p.init, p.shape, self.param_dtype) for n, p in spec.params.items()}
        return spec(graph, inputs, params)


def _common(
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    backend: str = "auto",
    precision: str | None = None,
    options: Options | None = None,
    initializers: Mapping[str, Initializer] | None = None,
) -> None:
    """Its arguments are the attributes of all layers, after their own."""


class LinenLayer(nn.Module):
    """Makes a specification from the module's attributes and the first call, makes its parameters and calls it.

    A class names its specification, as in `class GCNConv(LinenLayer, kind=GCNSpec)`. The specification's fields
    are the layer's attributes, and its documentation is the layer's.
    """

    returns_destinations: ClassVar[bool] = True  # on `Block.bipartite`
    kind: ClassVar[type[LayerSpec]]
    deterministic: bool | None = dataclasses.field(default=None, kw_only=True)

    def __init_subclass__(cls, kind: type[LayerSpec] | None = None, **keywords: Any) -> None:
        if kind is not None:
            cls.kind = kind
            common = inspect.signature(_common).parameters
            own = modules.attributes(kind) | {name: (p.annotation, p.default) for name, p in common.items()}
            cls.__annotations__ = {name: type_ for name, (type_, _) in own.items()}
            for name, (_, default) in own.items():
                if default is not dataclasses.MISSING:
                    setattr(cls, name, default)
            cls.__doc__ = modules.documentation(kind, "linen")
        super().__init_subclass__(**keywords)

    @nn.compact
    def __call__(
        self,
        graph: RelGraph,
        x: Any = None,
        edge_features: Array | None = None,
        *,
        deterministic: bool | None = None,
    ) -> Any:
        """The layer's new node values, [num_nodes, out]; the arguments are those of the nnx module.

        Raises:
          ValueError: sizes that do not fit each other, or x or edge_features of another shape.
        """
        own: Any = self  # subclasses have the fields of their specification, and the arguments of `_common`
        pair = isinstance(x, tuple | list)
        found = {
            "in_features": None if x is None else tuple(part.shape[-1] for part in x) if pair else x.shape[-1],
            "out_features": own.features,
            "num_edge_types": graph.num_edge_types,
            "num_node_types": graph.num_node_types,
            "num_nodes": graph.num_nodes if x is None else None,
            "num_source_pairs": graph.num_source_pairs if x is None else None,
            "edge_features": None if edge_features is None else edge_features.shape[-1],
            "options": parameters.resolve_options(own.backend, own.precision, own.options),
        }
        names = [field.name for field in dataclasses.fields(self.kind)]
        spec = self.kind(**{name: found[name] if name in found else getattr(self, name) for name in names})
        params = {
            name: self.param(name, parameter.init, parameter.shape, own.param_dtype)
            for name, parameter in parameters.with_initializers(spec.params(), own.initializers).items()
        }
        key = None
        if spec.stochastic and not self.is_initializing():
            if not nn.merge_param("deterministic", self.deterministic, deterministic):
                key = self.make_rng("dropout")
        return spec(graph, x, params, key, edge_features)
