"""Parameters of layers, without Flax: shapes, initialisers and dtypes; and how a layer's options are resolved."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from dejax.rgnn.compiler.program import Program
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.options import Options

Initializer: TypeAlias = Callable[..., Array]


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _uniform(key: Array, scale: Any, *, shape: tuple[int, ...], dtype: Any) -> Array:
    """`scale * jax.random.uniform(key, shape, dtype, -1)`, bit for bit.

    The bits are drawn along one axis: XLA's CPU compiler takes 2.6 s for random bits of four axes, 0.1 s for one.
    """
    return jax.random.uniform(key, (math.prod(shape),), dtype, -1).reshape(shape) * jnp.asarray(scale, dtype)


@dataclass(frozen=True, slots=True)
class Glorot:
    """Glorot (uniform) for matrices: `jax.nn.initializers.glorot_uniform`, whose other axes are all batch axes.

    Attributes:
        rows: the axis of a matrix's rows.
        columns: the axes that together are its columns.
    """

    rows: int
    columns: tuple[int, ...]

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        variance = 2 / (shape[self.rows] + math.prod(shape[axis] for axis in self.columns))
        scale = np.sqrt(3 * np.asarray(variance, dtype))
        return _uniform(key, scale, shape=tuple(shape), dtype=jnp.dtype(dtype))


# The leading axes (types, heads, bases or blocks) do not count towards a matrix's fans.
PER_MATRIX = {3: Glorot(1, (2,)), 4: Glorot(2, (3,))}
# [types, heads, k, d] is one k x (heads d) matrix per type.
PER_TYPE_HEADS = Glorot(2, (1, 3))
GLOROT = Glorot(0, (1,))


def attention_vector(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    """Glorot (uniform) for vectors [..., d] that map d features to one score."""
    limit = math.sqrt(6.0 / (shape[-1] + 1))
    return jax.random.uniform(key, (math.prod(shape),), dtype, -limit, limit).reshape(shape)


@dataclass(frozen=True, slots=True)
class OneHotGlorot:
    """Glorot (uniform) for rows of the [num_nodes, n] matrix that would multiply a one-hot input."""

    num_nodes: int

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        limit = math.sqrt(6.0 / (self.num_nodes + shape[-1]))
        return jax.random.uniform(key, shape, dtype, -limit, limit)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Shape and initialiser of one parameter; `init(key, shape, dtype)`."""

    shape: tuple[int, ...]
    init: Initializer


ParamSpecs: TypeAlias = dict[str, ParamSpec]


def _drawn_already(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    raise TypeError(
        "the parameters of this module must be drawn once, got a second call; make another module to draw other "
        "parameters"
    )


def with_initializers(specs: ParamSpecs, initializers: Mapping[str, Initializer] | None) -> ParamSpecs:
    """The same parameters, some with the user's initialiser.

    Raises:
      ValueError: `initializers` names a parameter that the layer does not have.
    """
    unknown = sorted(set(initializers or ()) - set(specs))
    if unknown:
        raise ValueError(f"initializers: this layer has parameters {sorted(specs)}, got an initialiser for {unknown}")
    return {name: ParamSpec(s.shape, (initializers or {}).get(name, s.init)) for name, s in specs.items()}


def resolve_options(
    backend: str, precision: str | None, options: Options | None, base: Options | None = None
) -> Options:
    """The compiler options of a layer: `options`, or `base` with the backend and precision that are given."""
    if options is None:
        options = Options() if base is None else base
        if backend != "auto":
            options = dataclasses.replace(options, backend=backend)
        return options if precision is None else dataclasses.replace(options, precision=precision)
    if backend != "auto" or precision is not None:
        raise ValueError(
            f"backend and precision must not be given together with options, got backend={backend!r}, "
            f"precision={precision!r} and options={options}; set them in options"
        )
    return options


def cast(tree: Any, dtype: DTypeLike | None) -> Any:
    """Floating-point leaves in `dtype`; with None, in the type that all of them promote to (Flax's rule)."""

    def inexact(x: Any) -> bool:
        return jnp.issubdtype(jnp.result_type(x), jnp.inexact)

    if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"`dtype` must be a dtype of floats, got {jnp.dtype(dtype)}: weights would be cut to integers")
    leaves = [x for x in jax.tree.leaves(tree) if inexact(x)]
    if dtype is None and leaves:
        dtype = jnp.result_type(*leaves)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if inexact(x) else x, tree)


def check_size(owner: str, name: str, size: Any) -> None:
    """Raises unless `size` is an integer of at least 1."""
    try:
        number = operator.index(size)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be an integer, got {size!r}") from None
    if number < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {size}")


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A relational program, with the shapes and initialisers of the arguments that are parameters."""

    program: Program
    owned: tuple[tuple[str, ParamSpec], ...]
    dtype: DTypeLike | None
    options: Options

    @classmethod
    def make(
        cls,
        program: Any,
        params: Mapping[str, tuple[tuple[int, ...], Initializer]],
        dtype: DTypeLike | None,
        backend: str,
        precision: str | None,
        options: Options | None,
    ) -> ProgramSpec:
        """From a mapping of name to (shape, initialiser); by default with the program's own options.

        Raises:
          TypeError: `program` is not a program, or a value of `params` is not such a pair.
          ValueError: a parameter has the name of a keyword of programs.
        """
        if not isinstance(program, Program):
            raise TypeError(f"ProgramModule: program must be made by @rgnn.program, got {type(program).__name__}")
        for name, value in params.items():
            if name in ("graph", "options"):
                raise ValueError(
                    f"ProgramModule: names of parameters must not be keywords of programs, got {name!r}; rename the "
                    "parameter"
                )
            if not (isinstance(value, tuple) and len(value) == 2 and callable(value[1])):
                raise TypeError(
                    f"ProgramModule: params[{name!r}] must be (shape, initialiser), for instance "
                    f"((8, 16), jax.nn.initializers.glorot_uniform()), got {value!r}"
                )
        owned = tuple((name, ParamSpec(tuple(shape), init)) for name, (shape, init) in params.items())
        return cls(program, owned, dtype, resolve_options(backend, precision, options, program.options))

    @property
    def params(self) -> ParamSpecs:
        return dict(self.owned)

    def drawn(self) -> ProgramSpec:
        """The specification without initialisers, once parameters are drawn: JAX's initialisers cannot be pickled."""
        owned = tuple((name, ParamSpec(spec.shape, _drawn_already)) for name, spec in self.owned)
        return dataclasses.replace(self, owned=owned)

    def __call__(self, graph: RelGraph, inputs: tuple[Any, ...], params: dict[str, Array]) -> Any:
        inputs, params = cast((inputs, params), self.dtype)
        return self.program(graph, *inputs, **params, options=self.options)


def params_to_linen(module: Any) -> dict[str, Any]:
    """Converts the parameters of an nnx module to linen variables, `{"params": {...}}`.

    The names of parameters and layers are kept. So a model of several layers needs the same layer names in both
    frameworks (in linen: `self.first` in `setup`, or `name="first"`).

    Args:
      module: an `nnx.Module`, or an `nnx.State` of parameters.

    >>> from flax import nnx
    >>> from dejax.rgnn.nnx import GCNConv, params_to_linen
    >>> variables = params_to_linen(GCNConv(2, 3, rngs=nnx.Rngs(0)))
    >>> {name: value.shape for name, value in variables["params"].items()}
    {'bias': (3,), 'weight': (2, 3)}
    """
    from flax import nnx

    state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
    return {"params": nnx.to_pure_dict(state)}


def params_from_linen(module: Any, variables: Mapping[str, Any]) -> None:
    """Writes linen variables into the parameters of an nnx module, in place.

    Args:
      module: an `nnx.Module` whose parameters have the names and shapes of `variables["params"]`.
      variables: linen variables, `{"params": {...}}`.

    Raises:
      ValueError: the names or shapes differ.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from dejax.rgnn.nnx import GCNConv, params_from_linen
    >>> layer = GCNConv(2, 3, rngs=nnx.Rngs(0))
    >>> params_from_linen(layer, {"params": {"weight": jnp.ones((2, 3)), "bias": jnp.ones(3)}})
    >>> layer.bias[...]
    Array([1., 1., 1.], dtype=float32)
    """
    from flax import nnx

    state = nnx.state(module, nnx.Param)
    mine = _flat(nnx.to_pure_dict(state))
    given = _flat(variables["params"])
    if mine.keys() != given.keys():
        raise ValueError(
            f"variables['params'] must have the module's parameters, got {sorted(given.keys() - mine.keys())} in "
            f"addition and lacks {sorted(mine.keys() - given.keys())}"
        )
    for name, value in given.items():
        if jnp.shape(value) != jnp.shape(mine[name]):
            raise ValueError(f"parameter {name!r} must have shape {jnp.shape(mine[name])}, got {jnp.shape(value)}")
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, dict(variables["params"])))
    nnx.update(module, state)


def _flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(dict(tree))}
