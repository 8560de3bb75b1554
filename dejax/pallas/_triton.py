"""What kernels are made of: calls, loads, stores, products, extrema and atomic additions, for both lowerings.

This is the only file that names Pallas' own lowering to Triton, which is deprecated since jax 0.11 and has no successor
for gathered loads on Hopper. `dejax.pallas.lowering` is dejax's; without the former it is the only one
(docs/performance/lowering.md compares them).

Kernels of this package keep to these rules, which make interpret mode run the same code:

- every axis of a load or store is indexed by an array (in jax 0.10 a Python int breaks interpret mode);
- a lane that must not be stored has an index past the end of some axis, besides a false mask: interpret mode stores by
  a scatter, which drops such lanes, but writes old values back for lanes that are only masked, over their duplicates.

Maxima and minima of floats are those of this module: the lowering's own drop NaN, where `jax.numpy` keeps it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

# Pallas imports this module when it traces the first interpreted kernel. The module adds a flag to what jax.jit's
# caches compare, so that the first interpreted program of a process was traced and compiled twice.
import jax._src.pallas.fuser.jaxpr_fusion
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas import primitives as pallas_primitives
from jax.extend import source_info_util
from jax.extend.core import Primitive

from dejax import _compat
from dejax._jaxprs import loop
from dejax._platform import on_gpu
from dejax.pallas._calls import KernelCall, call_kernel, looked_up
from dejax.pallas._shapes import divide
from dejax.pallas._tiles import broadcast, where
from dejax.pallas.formats.table_slice import SliceRef, TableSlice
from dejax.pallas.lowering import primitives
from dejax.pallas.lowering.choice import chosen
from dejax.pallas.lowering.launch import KernelSchedule

try:
    import jax.experimental.pallas.triton as plt
    from jax._src.pallas.triton import lowering
    from jaxlib.mlir.dialects import arith
except ImportError:  # JAX has removed it, as it says it will
    plt = lowering = arith = None  # type: ignore[assignment]

# The warning comes when a jitted function is lowered, which is in the user's code and not in ours: a scope around our
# calls would not catch it.
warnings.filterwarnings("ignore", message=r"The Pallas Triton backend is deprecated", category=DeprecationWarning)


def _name_dialect() -> None:
    """Lets MLIR's Python bindings find the operations of Triton's dialect, `tt`.

    For each operation they import a module of the dialect's name from among the dialects; jaxlib has it elsewhere, and
    what was not found is looked for again. Lowering the 30 kernels of a training step of HGT takes 0.24 s with this,
    0.53 with those 7,200 imports that fail.
    """
    name = "jaxlib.mlir.dialects.tt"
    with contextlib.suppress(ImportError):  # a jaxlib without Triton says so when a kernel is lowered
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = importlib.import_module("jaxlib.triton.dialect")


_name_dialect()


def _traceback_of_nothing() -> Any:
    """A traceback that has only this function, taken in a thread with nothing else on its stack."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(source_info_util.current().traceback))
    thread.start()
    thread.join()
    return found[0]


_nowhere = _traceback_of_nothing()


@contextlib.contextmanager
def _from_nowhere() -> Iterator[None]:
    """Operations do not tell from which lines of Python they come.

    Those lines would be part of a kernel's text, and so of its program's key in the compilation cache: a program would
    be compiled again after an edit above its call.
    """
    place = source_info_util.user_context(_nowhere)
    place.__enter__()
    try:
        yield
    finally:
        place.__exit__(None, None, None)  # errors keep the traceback that they have


_interpreted: contextvars.ContextVar[bool] = contextvars.ContextVar("dejax_kernel_interpreted", default=True)


def _lowering() -> str:
    """Which of `LOWERINGS` compiles the kernels that are traced now."""
    return chosen() or ("dejax" if plt is None else "pallas")


def _parameters(num_warps: int, num_stages: int) -> Any:
    if _lowering() == "pallas":
        return plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return KernelSchedule(num_warps, num_stages)


def _traced(kernel: Callable[..., Any], interpret: bool, slices: Mapping[int, TableSlice]) -> Callable[..., Any]:
    """The kernel as Pallas traces it.

    Functions of `jax.numpy` are run and not jitted, each for its own shapes (see `_tiles`). Functions of this module
    know whether the kernel is interpreted. The references with the numbers in `slices` are of these parts of an array.
    """

    @functools.wraps(kernel)
    def traced(*refs: Any) -> Any:
        token = _interpreted.set(interpret)
        try:
            with jax.disable_jit(), _from_nowhere():
                return kernel(*(SliceRef(ref, slices[i]) if i in slices else ref for i, ref in enumerate(refs)))
        finally:
            _interpreted.reset(token)

    return traced


_label: contextvars.ContextVar[str] = contextvars.ContextVar("dejax_kernel_label", default="")


@contextlib.contextmanager
def label(text: str) -> Iterator[None]:
    """Kernels called inside are named `<text>_<kernel>`, which is how profiles show them."""
    token = _label.set(text)
    try:
        yield
    finally:
        _label.reset(token)


def use_interpreter(interpret: bool | None) -> bool:
    """Whether to run kernels interpreted: `interpret`, or if it is None, whether they are traced for no GPU."""
    return not on_gpu() if interpret is None else interpret


_INTERPRETED = (
    "a function that was traced for a GPU is compiled for the CPU, where its arguments lie: kernels are interpreted, "
    'which is slow; call the function under `with jax.default_device("cpu"):`, so that XLA computes it there'
)


def pallas_call(
    kernel: Callable[..., None],
    *,
    name: str,
    num_programs: int,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Sequence[jax.Array]]:
    """A call of `kernel` on whole arrays, for each program id of a one-dimensional grid.

    One axis, because CUDA's other two end at 65,535 and because a kernel that splits the id itself settles which of its
    blocks run next to each other, whatever `vmap` adds. Operands may be `TableSlice`s. Where jax lowers a program for
    a CPU, the kernel is interpreted, with a warning.
    """

    def run(*operands: Any) -> Sequence[jax.Array]:
        if not interpret:
            _check_offsets(name, [*operands, *out_shape])
        slices = {i: replace(o, table=None) for i, o in enumerate(operands) if isinstance(o, TableSlice)}
        full_name = f"{_label.get()}_{name}" if _label.get() else name

        def kernel_call(interpret: bool) -> Callable[..., Any]:
            return pl.pallas_call(
                _traced(kernel, interpret, slices),
                out_shape=list(out_shape),
                grid=(num_programs,),
                compiler_params=_parameters(num_warps, num_stages),
                interpret=interpret,
                input_output_aliases=dict(aliases or {}),
                name=full_name,
            )

        def on_cpu(*given: Any) -> Sequence[Any]:
            warnings.warn(_INTERPRETED, stacklevel=2)
            return kernel_call(interpret=True)(*given)

        given = [o.table if isinstance(o, TableSlice) else o for o in operands]
        called = KernelCall(name, kernel_call(interpret), tuple(out_shape))
        if not interpret:
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
            parts = {i: (s.start, s.length) for i, s in slices.items()}
            told = kernel, types, parts, num_programs, num_warps, num_stages, aliases, full_name
            called = looked_up(replace(called, elsewhere=on_cpu, lowering=_lowering()), *told)
        return call_kernel(called, given)

    return run


def offsets_fit(array: Any) -> bool:
    """Whether kernels reach all elements of an array of this shape and dtype.

    Pallas' lowering takes offsets of 32 bits, with a sign, for arrays of up to 2^32 bytes: too few for elements of 8
    bits, of which there may be more than 2^31.
    """
    return jnp.dtype(array.dtype).itemsize > 1 or _lowering() == "dejax" or not 2**31 < math.prod(array.shape) <= 2**32


def _check_offsets(name: str, arrays: Sequence[Any]) -> None:
    for array in arrays:
        if not offsets_fit(array):
            raise NotImplementedError(
                f"arrays of the kernel {name} must have at most 2^31 elements of 8 bits, got {array.dtype}"
                f"{list(array.shape)}; compute on parts of the array, or without kernels (backend='xla')"
            )


def program_ids(*inner: int) -> tuple[jax.Array, ...]:
    """The program id as the index of a grid whose inner axes have the given sizes, the last of them fastest."""
    rest = pl.program_id(0)
    ids: list[jax.Array] = []
    for size in reversed(inner):
        if size == 1:
            ids.append(lax.full((), 0, jnp.int32))
        else:
            rest, here = divide(rest, size)
            ids.append(here)
    return rest, *reversed(ids)


def when(condition: jax.Array, do: Callable[[], None]) -> None:
    """Runs `do`, which only stores, where `condition` holds for the whole program."""
    pl.when(condition)(do)


def either(condition: jax.Array, yes: Callable[[], jax.Array], no: Callable[[], jax.Array]) -> jax.Array:
    """The scalar of `yes` where `condition` holds for the whole program, else that of `no`; only one of them runs."""
    return lax.cond(condition, yes, no)


def fori_loop(lower: Any, upper: Any, step: Callable[[Any, Any], Any], init: Any) -> Any:
    """`lax.fori_loop` of a kernel, where `jit` is disabled."""

    @functools.wraps(step)
    def traced(*args: Any) -> Any:
        with _from_nowhere():
            return step(*args)

    return loop(lower, upper, traced, init)


def load(ref: Any, indices: tuple[jax.Array, ...], mask: jax.Array | None = None, other: Any = None) -> jax.Array:
    """`ref[indices]`, `other` (0 by default) where `mask` is false."""
    if isinstance(ref, SliceRef):
        ref, indices = ref.ref, (indices[0] + ref.start,)
    if mask is None:
        return pallas_primitives.load(ref, indices)
    other = np.zeros((), ref.dtype) if other is None else other
    return pallas_primitives.load(ref, indices, mask=mask, other=other)


def store(ref: Any, indices: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array | None = None) -> None:
    """`ref[indices] = value` where `mask` is true; see the module's rule on lanes that are not stored."""
    pallas_primitives.store(ref, indices, value.astype(ref.dtype), mask=mask)


def arrive(ref: Any, index: jax.Array) -> jax.Array:
    """Adds 1 to `ref[index]` and returns its previous value; `index` is a scalar.

    Programs that arrive later see what this one has stored. `ref` is float32, which counts exactly up to 2^24, because
    Pallas lowers additions to tiles of integers as if they were floats.
    """
    if _interpreted.get():  # one program after the other
        at = (index[None],)
        before = load(ref, at)
        store(ref, at, before + 1)
        return before.reshape(())
    # One thread counts, for what all threads have stored, and tells the others by a sum: as a number that is no tile it
    # would go through shared memory, and a loop whose program takes any of that is slower, by up to a quarter.
    lane = lax.iota(jnp.int32, 32)
    first = lax.eq(lane, np.int32(0))
    barrier()
    place, one = lane * 0 + index, lax.full((32,), np.float32(1))
    if _lowering() == "dejax":
        before = primitives.atomic_add(ref, place, one, first)
    else:
        before = plt.atomic_add(ref, (place,), one, mask=first)
    barrier()
    return lax.reduce_sum(where(first, before, 0.0), (0,))


def barrier() -> None:
    """A barrier for the threads of one program: loads after it see what the program stored before it."""
    if not _interpreted.get():
        (primitives.barrier if _lowering() == "dejax" else plt.debug_barrier)()


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """`x * y + z` of float32 tiles of one shape, in one instruction an element: Triton here does not fuse the two."""
    if _interpreted.get():
        return lax.add(lax.mul(x, y), z)
    return _instruction("fma.rn.f32 $0, $1, $2, $3;", x, y, z)


def narrowed(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Rounds float32 numbers to a 16-bit float dtype; returns them in that dtype, and again in float32.

    For a GPU, XLA takes a conversion and its inverse for none (`xla_allow_excess_precision`), outside of kernels and in
    interpreted ones. It keeps `reduce_precision`, which Triton does not know.
    """
    if _interpreted.get():
        x = lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
    narrow = x.astype(dtype)
    return narrow, narrow.astype(jnp.float32)


def exp2(x: jax.Array) -> jax.Array:
    """2 to the power of a float32 tile, within 2 units in the last place; denormal results are 0."""
    return lax.exp2(x) if _interpreted.get() else _instruction("ex2.approx.ftz.f32 $0, $1;", x)


def maximum(x: Any, y: Any) -> jax.Array:
    """The larger elements of two tiles of one dtype, or of a tile and a number; axes of size 1 broadcast, NaN stays."""
    return _extremum("max", x, y)


def minimum(x: Any, y: Any) -> jax.Array:
    """The smaller elements of two tiles of one dtype, or a tile and a number; axes of size 1 broadcast, NaN stays."""
    return _extremum("min", x, y)


def reduce_max(x: jax.Array, axis: int) -> jax.Array:
    """The largest elements of a tile along an axis; NaN where one of them is NaN."""
    return _reduced_extremum("max", x, axis)


def reduce_min(x: jax.Array, axis: int) -> jax.Array:
    """The smallest elements of a tile along an axis; NaN where one of them is NaN."""
    return _reduced_extremum("min", x, axis)


def _extremum(kind: str, x: Any, y: Any) -> jax.Array:
    shape, dtype = np.broadcast_shapes(np.shape(x), np.shape(y)), jnp.result_type(x, y)
    x, y = (broadcast(a if isinstance(a, jax.Array) else np.asarray(a, dtype), shape) for a in (x, y))
    if _interpreted.get() or not jnp.issubdtype(dtype, jnp.floating):
        return {"max": lax.max, "min": lax.min}[kind](x, y)
    return _extremum_with_nan(kind, x, y)


def _extremum_with_nan(kind: str, x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype == jnp.float32:  # one instruction
        return _with_nan[kind].bind(x, y)
    chosen = {"max": lax.gt, "min": lax.lt}[kind](x, y)
    return lax.select(lax.bitwise_or(chosen, lax.ne(x, x)), x, y)


def _reduced_extremum(kind: str, x: jax.Array, axis: int) -> jax.Array:
    if _interpreted.get():
        return _compat.reduce_extremum(kind, x, axis)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return {"max": lax.reduce_max, "min": lax.reduce_min}[kind](x, (axis,))
    return _reduced_with_nan[kind].bind(x, axes=(axis,))


def _primitives(kind: str) -> tuple[Primitive, Primitive]:
    """Primitives for the extremum of two float32 tiles and of a tile along an axis, with lowerings that keep NaN."""
    of_two, along = Primitive(f"{kind}imum_with_nan"), Primitive(f"{kind}imum_with_nan_along")
    shaped = jax.core.ShapedArray
    of_two.def_abstract_eval(lambda x, y: shaped(x.shape, x.dtype))
    along.def_abstract_eval(lambda x, axes: shaped(tuple(np.delete(x.shape, axes).tolist()), x.dtype))
    if lowering is not None:
        lowering.register_lowering(of_two)(lambda _, x, y: getattr(arith, f"{kind}imumf")(x, y))
        combine = functools.partial(_extremum_with_nan, kind)
        lowering.register_lowering(along)(functools.partial(lowering._reduce_lowering, combine))
    return of_two, along


_with_nan: dict[str, Primitive] = {}
_reduced_with_nan: dict[str, Primitive] = {}
for _kind in ("max", "min"):
    _with_nan[_kind], _reduced_with_nan[_kind] = _primitives(_kind)


def _instruction(text: str, *args: jax.Array) -> jax.Array:
    """One instruction of PTX on each number of float32 tiles of one shape."""
    if _lowering() == "dejax":
        return primitives.instruction(text, *args)
    (result,) = plt.elementwise_inline_asm(
        text, args=args, constraints=",".join(["=f", *"f" * len(args)]), pack=1,
        result_shape_dtypes=(jax.ShapeDtypeStruct(args[0].shape, jnp.float32),),
    )  # fmt: skip
    return result


# How operands of a product are rounded; sums are float32 always.
PRECISIONS = ("f32", "tf32", "bf16")


def product_dtype(x: jnp.dtype, y: jnp.dtype, precision: str) -> jnp.dtype:
    """The dtype to which operands of a product are cast: bfloat16 and float16 stay, float32 follows `precision`."""
    if x == y and x in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return x
    return jnp.dtype(jnp.bfloat16 if precision == "bf16" else jnp.float32)


def dot(x: jax.Array, y: jax.Array, precision: str, *, transpose_x: bool = False) -> jax.Array:
    """The float32 product of two tiles, every side of which is at least 16.

    Args:
      x: [m, k], or [k, m] with `transpose_x`.
      y: [k, n].
      precision: the precision of float32 operands, `f32` or `tf32`; others have one precision.
    """
    if x.dtype == jnp.float32:
        how = lax.Precision.HIGHEST if precision == "f32" else lax.Precision.HIGH
    else:
        how = None
    return lax.dot_general(
        x,
        y,
        dimension_numbers=(((0 if transpose_x else 1,), (0,)), ((), ())),
        precision=how,
        preferred_element_type=jnp.float32,
    )


TwoParts = tuple[jax.Array, jax.Array]


def exact_dot(x: TwoParts, y: TwoParts, *, transpose_x: bool = False) -> jax.Array:
    """The product of two tiles that come as `row_scaled.two_parts`, to 22 bits of each; smallest terms first.

    Small parts add nothing where the product of the large ones is not finite: infinity times a small part is NaN.
    """
    pairs = ((x[1], y[0]), (x[0], y[1]), (x[0], y[0]))
    small, mixed, large = (dot(left, right, "tf32", transpose_x=transpose_x) for left, right in pairs)
    return large + where(lax.lt(lax.abs(large), np.float32(np.inf)), (small + mixed) * np.float32(2.0**-11), 0.0)
