"""Modules of Flax nnx: what all layers share, and a module of any program."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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

with optional("flax", of="dejax.rgnn.nnx"):
    from flax import nnx


class NnxLayer(nnx.Module):
    """A specification, its parameters as attributes, and a stream of keys where it has dropout.

    A class names its specification, as in `class GCNConv(NnxLayer, kind=GCNSpec)`. The specification's fields
    are the layer's arguments, and its documentation is the layer's.
    """

    returns_destinations = True  # on `Block.bipartite`
    kind: ClassVar[type[LayerSpec]]
    arguments: ClassVar[inspect.Signature]

    def __init_subclass__(cls, kind: type[LayerSpec] | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if kind is not None:
            cls.kind = kind
            cls.arguments = cls.__signature__ = modules.signature(kind, inspect.signature(NnxLayer.__init__))
            cls.__doc__ = modules.documentation(kind, "nnx")
        elif "__init__" in vars(cls):  # a user's class with arguments of its own
            own = list(inspect.signature(cls.__init__).parameters.values())[1:]
            cls.__signature__ = inspect.Signature(own)

    def __init__(
        self,
        *sizes: Any,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        precision: str | None = None,
        options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        given = self.arguments.bind(*sizes, rngs=rngs, **settings).arguments
        del given["rngs"]
        self.spec = self.kind(**given, dtype=dtype, options=parameters.resolve_options(backend, precision, options))
        for name, parameter in parameters.with_initializers(self.spec.params(), initializers).items():
            setattr(self, name, nnx.Param(parameter.init(rngs.params(), parameter.shape, param_dtype)))
        self.deterministic = False
        self.rngs = rngs["dropout"].fork() if self.spec.stochastic else nnx.data(None)

    def __call__(
        self,
        graph: RelGraph,
        x: Any = None,
        edge_features: Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Any:
        """Computes the new node features.

        Args:
          graph: a graph. If the layer reads types, the graph has as many types as the layer was made for.
          x: node features [num_nodes, in_features]; a pair (sources, destinations) if the layer takes one; None for
            R-GCN without features.
          edge_features: [num_edges, width] in the user's order of edges, if the layer was made with a width; for
            `GCNConv` weights [num_edges].
          deterministic: True disables dropout; None follows `train()` and `eval()`.
          rngs: its `dropout` stream gives the dropout key, instead of the module's own stream.

        Returns:
          Array [num_nodes, width of the result]. If `graph.only_destinations`, only the rows of the first
          num_destinations nodes. If x is a pair, one row for each destination.

        Raises:
          ValueError: the graph's counts or the shapes of x and edge_features do not fit the layer.
        """
        params = {name: getattr(self, name)[...] for name in self.spec.params()}
        key = None
        if self.spec.stochastic and not (self.deterministic if deterministic is None else deterministic):
            key = self.rngs() if rngs is None else rngs["dropout"]()
        return self.spec(graph, x, params, key, edge_features)


class ProgramModule(nnx.Module):
    """Wraps a relational program (`@rgnn.program`) as an nnx module that holds some arguments as parameters.

    Args:
      program: a program, called as `program(graph, *inputs, **parameters)`.
      params: for each argument of the program that becomes a parameter, by its name: a pair (shape, initialiser).
      dtype, param_dtype, backend, precision, options, rngs: as in `RGCNConv`.

    Raises:
      ValueError: a parameter has the name of an attribute of the module.
    """

    returns_destinations = True

    def __init__(
        self,
        program: Any,
        params: Mapping[str, tuple[tuple[int, ...], Initializer]],
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        precision: str | None = None,
        options: Options | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        spec = parameters.ProgramSpec.make(program, params, dtype, backend, precision, options)
        self.spec = spec.drawn()
        for name, parameter in spec.params.items():
            if hasattr(self, name):
                raise ValueError(
                    f"ProgramModule: names of parameters must not be attributes of the module, got {name!r}; rename "
                    "the parameter"
                )
            setattr(self, name, nnx.Param(parameter.init(rngs.params(), parameter.shape, param_dtype)))

    def __call__(self, graph: RelGraph, *inputs: Any) -> Any:
        """Calls the program with the graph, `inputs` (its arguments that are not parameters, in order), and the
        parameters.
        """
        return self.spec(graph, inputs, {name: getattr(self, name)[...] for name in self.spec.params})
