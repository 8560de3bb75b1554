"""The contract of the kernel templates: cases of every kind. The products' references are in `products.reference`.

Used interpreted (tests/pallas), lowered for a GPU that is not there (test_lowering) and on a GPU (tests/gpu).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax import pallas as kernels
from dejax.pallas.formats.row_scaled import encode
from dejax.pallas.products import reference as products
from dejax.pallas.products.weight_gradient import split_table

# Relative to the largest element: products of TF32 precision round operands to 10 bits, and so is row-scaled float16.
TF32 = 2e-3


def interpreted(function: Any) -> Any:
    """`jax.jit` with little optimization: interpreted kernels take longer to compile than to run their few programs."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


# --- grouped GEMM ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gemm:
    """One grouped GEMM. `counts` are the positions of each type; `padding` more positions have no type."""

    counts: tuple[int, ...] = (9, 0, 21, 1)
    padding: int = 0
    rows: int = 13
    heads: int | None = 2
    k: int = 17
    n: int = 3
    gather: bool = True
    scatter: bool = True
    transpose_w: bool = False
    bias: bool = False
    activation: str | None = None
    dot_vector: bool = False
    dot_parts: int = 1
    covers_all: bool = False
    precision: str = "tf32"
    dtype: Any = jnp.float32
    out_dtype: Any = None
    block: int = 16
    scaled_in: bool = False
    scaled_out: bool = False
    schedule: kernels.GemmSchedule | None = None

    @property
    def positions(self) -> int:
        return sum(self.counts) + self.padding

    @property
    def out_rows(self) -> int:
        return self.positions + (5 if self.scatter and not self.covers_all else 0)

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        types, heads = len(self.counts), self.heads or 1
        rows = self.rows if self.gather else self.positions
        shape = (types, heads, self.n, self.k) if self.transpose_w else (types, heads, self.k, self.n)
        a = {
            "x": rng.standard_normal((rows, heads, self.k)),
            "w": rng.standard_normal(shape) / np.sqrt(self.k),
            "offsets": np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32),
        }
        if self.gather:  # some rows twice, and past the end where the position is padding
            a["x_index"] = rng.integers(0, rows, self.positions).astype(np.int32)
            a["x_index"][self.positions - self.padding :] = rows
        if self.scatter:
            a["out_index"] = rng.permutation(self.out_rows)[: self.positions].astype(np.int32)
        if self.bias:
            a["bias"] = rng.standard_normal((types, heads, self.n))
        if self.dot_vector:
            a["dot_vector"] = rng.standard_normal((types, heads, self.n))
        for name in ("x", "w", "bias", "dot_vector"):
            if name in a:
                a[name] = np.asarray(a[name], jnp.dtype(self.dtype))
                if self.heads is None:
                    a[name] = a[name].squeeze(1)
        a["tile_type"], a["tile_start"] = tile_table(a["offsets"], self.block, self.positions)
        return a

    def request(self, a: dict[str, Any]) -> kernels.GroupedGemm:
        tiles = a["tile_type"], a["tile_start"]
        groups = kernels.GemmGroups(a["offsets"], self.positions, lambda _: tiles, self.block)
        epilogue = kernels.GemmEpilogue(a.get("bias"), self.activation, a.get("dot_vector"), self.dot_parts)
        output = kernels.GemmOutput(a.get("out_index"), self.out_rows, self.covers_all, self.out_dtype, self.scaled_out)
        return kernels.GroupedGemm(
            a["x"], a["w"], groups, a.get("x_index"), None, self.transpose_w, epilogue, output, self.precision
        )

    def run(self, a: dict[str, Any], interpret: bool | None = None) -> Any:
        request = self.request(a | {"x": encode(jnp.asarray(a["x"]))} if self.scaled_in else a)
        return kernels.grouped_gemm(request, schedule=self.schedule, interpret=interpret)

    def check(self, result: Any, a: dict[str, np.ndarray], tolerance: float | None = None) -> None:
        y, dot = products.grouped_gemm(self.request(a))
        got = result if self.dot_vector else (result, None)
        if isinstance(got[0], kernels.RowScaled):
            assert self.scaled_out and got[0].mantissa.dtype == jnp.float16
            got = (decoded(got[0]), got[1])
        tolerance = TF32 if tolerance is None and self.precision == "tf32" and self.dtype == jnp.float32 else tolerance
        expected_dtype = self.out_dtype or self.dtype
        assert got[0].dtype == expected_dtype
        low = self.precision == "bf16" or self.dtype != jnp.float32 or self.out_dtype not in (None, jnp.float32)
        assert_close(got[0], y, low, tolerance)
        if dot is not None:
            assert_close(got[1], dot, low, tolerance)


def tile_table(offsets: np.ndarray, block: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Types and starts of tiles, with one unused tile at the end."""
    tiles = [(t, s) for t in range(len(offsets) - 1) for s in range(offsets[t], offsets[t + 1], block)]
    table = np.array([*tiles, (0, offsets[-1])], np.int32)
    return table[:, 0], table[:, 1]


GEMMS = {
    "plain": Gemm(),
    "k 1, n 1, one head": Gemm(k=1, n=1, heads=1),
    "no heads axis": Gemm(heads=None, k=3, n=17, dot_vector=True),
    "wide": Gemm(k=100, n=100, heads=1, counts=(20,)),
    "k in blocks": Gemm(k=200, n=1, heads=1, counts=(5, 5)),
    "n in blocks": Gemm(k=3, n=130, heads=2, counts=(5, 5)),
    "eight heads": Gemm(k=16, n=16, heads=8),
    "heads merged": Gemm(heads=4, k=5, n=7, counts=(9, 2), activation="relu"),
    "some heads merged": Gemm(heads=6, k=20, n=3, counts=(9, 2), transpose_w=True),
    "heads one by one": Gemm(heads=4, k=5, n=7, counts=(9, 2), precision="f32"),
    "transposed": Gemm(transpose_w=True),
    "transposed, k in blocks": Gemm(transpose_w=True, k=150, n=16, counts=(5, 5)),
    "no gather": Gemm(gather=False),
    "no scatter": Gemm(scatter=False),
    "dense both sides": Gemm(gather=False, scatter=False, covers_all=True),
    "padding": Gemm(padding=6),
    "padding, no indices": Gemm(padding=6, gather=False, scatter=False),
    "all types empty": Gemm(counts=(0, 0), padding=3),
    "leaky relu, dot": Gemm(activation="leaky_relu:0.2", dot_vector=True),
    "relu": Gemm(activation="relu"),
    "bias": Gemm(bias=True),
    "bias, heads merged": Gemm(heads=4, k=5, n=7, counts=(9, 2), bias=True, activation="relu"),
    "bias, row-scaled, dot": Gemm(scaled_in=True, scaled_out=True, heads=None, bias=True, dot_vector=True),
    "tanh": Gemm(activation="tanh", heads=1),
    "sigmoid": Gemm(activation="sigmoid", heads=1),
    "bfloat16": Gemm(dtype=jnp.bfloat16),
    "bfloat16 to float32": Gemm(dtype=jnp.bfloat16, out_dtype=jnp.float32, dot_vector=True),
    "bf16 products": Gemm(precision="bf16"),
    "f32 products": Gemm(precision="f32"),
    "covers all": Gemm(covers_all=True),
    "block 32": Gemm(block=32, counts=(40, 0, 31)),
    "row-scaled": Gemm(scaled_in=True, scaled_out=True, heads=1),
    "row-scaled, heads merged": Gemm(scaled_in=True, scaled_out=True, heads=4, k=5, n=7, counts=(9, 2)),
    "row-scaled, columns in parts": Gemm(scaled_out=True, heads=2, k=16, n=128, counts=(5, 5)),
    "row-scaled, columns uneven": Gemm(scaled_in=True, scaled_out=True, heads=1, k=16, n=130, counts=(5, 5)),
    "three tiles a program": Gemm(heads=1, padding=6, schedule=kernels.GemmSchedule(32, 16, 4, 3, 3)),
    "four tiles a program, row-scaled, dot": Gemm(
        heads=None,
        scaled_in=True,
        scaled_out=True,
        dot_vector=True,
        schedule=kernels.GemmSchedule(32, 16, 4, 2, 4),
    ),
    "dot of four parts": Gemm(heads=None, n=32, dot_vector=True, dot_parts=4, scaled_out=True, padding=6),
    "dot of eight parts, padded": Gemm(heads=None, n=8, dot_vector=True, dot_parts=8),
    "heads, dot of two parts": Gemm(heads=3, n=16, dot_vector=True, dot_parts=2, bias=True, counts=(9, 2)),
    "row-scaled, transposed, dot": Gemm(scaled_in=True, scaled_out=True, heads=None, transpose_w=True, dot_vector=True),
    "row-scaled, stored longer": Gemm(
        k=20,
        n=36,
        scaled_in=True,
        scaled_out=True,
        heads=None,
        bias=True,
        activation="sigmoid",
        dot_vector=True,
    ),
    "row-scaled, heads stored longer": Gemm(k=60, n=100, scaled_in=True, scaled_out=True, heads=2),
    "row-scaled, heads stored longer, transposed": Gemm(
        k=36, n=20, scaled_in=True, scaled_out=True, heads=3, transpose_w=True, counts=(9, 2)
    ),
    "row-scaled, stored longer, transposed": Gemm(
        k=100, n=20, scaled_in=True, scaled_out=True, heads=1, transpose_w=True, padding=6
    ),
}


def decoded(rows: kernels.RowScaled) -> jax.Array:
    """The rows in float32, after a check that zeros are stored behind their features."""
    assert rows.mantissa.shape[-1] % 8 == 0 or rows.shape[-1] < 16
    assert not np.any(rows.mantissa[..., rows.shape[-1] :])
    return rows.decode()


def assert_close(got: Any, expected: np.ndarray, low: bool = False, tolerance: float | None = None) -> None:
    """Largest error against the largest expected magnitude: 2e-5, or 3e-2 where 8-bit mantissas are `low`."""
    got = np.asarray(got, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert np.all(np.isfinite(got)), "the result has entries that are not finite"
    if got.size:
        scale = max(1.0, float(np.max(np.abs(expected))))
        error = float(np.max(np.abs(got - expected))) / scale
        limit = (3e-2 if low else 2e-5) if tolerance is None else tolerance
        assert error <= limit, f"error {error:.3g} is over {limit:.3g}"


@dataclass(frozen=True)
class WeightGradient:
    """One grouped weight gradient."""

    counts: tuple[int, ...] = (9, 0, 21, 1)
    padding: int = 0
    heads: int | None = 2
    k: int = 17
    n: int = 3
    gather: bool = True
    precision: str = "tf32"
    dtype: Any = jnp.float32
    out_dtype: Any = jnp.float32
    rows_per_split: int | None = 8
    rows: int = 13
    row_scaled: tuple[str, ...] = ()
    shuffled: bool = False

    @property
    def positions(self) -> int:
        return sum(self.counts) + self.padding

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        heads = self.heads or 1
        rows = self.rows if self.gather else self.positions
        a = {
            "x": rng.standard_normal((rows, heads, self.k)),
            "y": rng.standard_normal((rows, heads, self.n)),
            "offsets": np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32),
        }
        if self.gather:
            for name in ("x_index", "y_index"):
                a[name] = rng.integers(0, rows, self.positions).astype(np.int32)
                a[name][self.positions - self.padding :] = rows
        for name in ("x", "y"):
            if name in a:
                a[name] = np.asarray(a[name], jnp.dtype(self.dtype))
                if self.heads is None:
                    a[name] = a[name].squeeze(1)
        return a

    def request(self, a: dict[str, Any]) -> kernels.GroupedWeightGradient:
        splits = None
        if self.shuffled:
            assert self.rows_per_split is not None
            start, end, first = split_table(jnp.asarray(a["offsets"]), self.rows_per_split, self.positions)
            number = np.random.default_rng(1).permutation(start.shape[0]).astype(np.int32)
            splits = start[number], end[number], first, jnp.asarray(number)
        return kernels.GroupedWeightGradient(
            **a, num_positions=self.positions, precision=self.precision, dtype=self.out_dtype,
            rows_per_split=self.rows_per_split, splits=splits,
        )  # fmt: skip

    def run(self, a: dict[str, Any], interpret: bool | None = None, schedule: Any = None) -> Any:
        request = self.request(a | {name: encode(jnp.asarray(a[name])) for name in self.row_scaled})
        return kernels.grouped_weight_gradient(request, schedule=schedule, interpret=interpret)

    def check(self, result: Any, a: dict[str, np.ndarray], tolerance: float | None = None) -> None:
        tolerance = TF32 if tolerance is None and self.precision == "tf32" and self.dtype == jnp.float32 else tolerance
        low = self.precision == "bf16" or self.dtype != jnp.float32 or self.out_dtype != jnp.float32
        empty = np.array(self.counts) == 0
        assert result.dtype == self.out_dtype
        assert_close(result, products.grouped_weight_gradient(self.request(a)), low, tolerance)
        assert not np.any(np.asarray(result, np.float32)[empty]), "a type without positions must give exact zeros"


WEIGHT_GRADIENTS = {
    "plain": WeightGradient(),
    "k 1, n 1, no heads axis": WeightGradient(k=1, n=1, heads=None),
    "wide": WeightGradient(k=100, n=100, heads=1, counts=(20,)),
    "tiles of the result": WeightGradient(k=70, n=130, heads=1, counts=(5, 4)),
    "eight heads": WeightGradient(k=16, n=16, heads=8),
    "heads merged": WeightGradient(heads=4, k=5, n=7, counts=(9, 2)),
    "some heads merged": WeightGradient(heads=6, k=20, n=3, counts=(9, 2)),
    "heads one by one": WeightGradient(heads=4, k=5, n=7, counts=(9, 2), precision="f32"),
    "no gather": WeightGradient(gather=False),
    "no gather, padding": WeightGradient(gather=False, padding=5),
    "padding": WeightGradient(padding=5),
    "one split a type": WeightGradient(rows_per_split=64),
    "default splits": WeightGradient(rows_per_split=None),
    "splits in any order": WeightGradient(shuffled=True, padding=5),
    "one split a type, in any order": WeightGradient(shuffled=True, rows_per_split=64),
    "all types empty": WeightGradient(counts=(0, 0), padding=9),
    "bfloat16": WeightGradient(dtype=jnp.bfloat16),
    "bfloat16 result": WeightGradient(dtype=jnp.bfloat16, out_dtype=jnp.bfloat16),
    "bf16 products": WeightGradient(precision="bf16"),
    "f32 products": WeightGradient(precision="f32"),
    "row-scaled": WeightGradient(row_scaled=("x", "y"), heads=1),
    "row-scaled y and float32 x": WeightGradient(row_scaled=("y",), heads=4, k=5, n=7, counts=(9, 2)),
    "row-scaled, stored longer": WeightGradient(row_scaled=("x", "y"), heads=None, k=20, n=100, padding=5),
    "row-scaled, heads stored longer": WeightGradient(row_scaled=("x", "y"), heads=3, k=20, n=36, counts=(9, 2)),
    "row-scaled x, heads stored longer": WeightGradient(row_scaled=("x",), heads=2, k=20, n=3, counts=(9, 2)),
    "row-scaled, 64 by 64": WeightGradient(
        k=64, n=64, heads=1, counts=(70, 3), row_scaled=("x", "y"), rows_per_split=None
    ),
    "wide, by one column": WeightGradient(k=256, n=1, heads=None, counts=(20,), padding=1),
}


# --- traversals ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traversal:
    """One traversal; `kind` names what its body does.

    attention: a score for each entry and head from an entry, an indexed and a row operand; softmax over the row,
      weighted sum of gathered rows; writes score and probability's numerator's logarithm by entry, and by row the
      weighted mean, the maximum and the sum of weights.
    sum, max: of gathered rows times an entry value, no epilogue.
    positioned: sum of rows gathered by a table in the order of rows; no entry id is needed.
    edges: entry outputs alone.
    columns: sum of gathered rows times a scalar of each entry, one column of an array of several; writes two scalars of
      the entry side by side.
    scalars: features of rank 0 and a shared scalar.
    """

    kind: str = "attention"
    degrees: tuple[int, ...] = (3, 0, 1, 9, 2, 2, 0, 17, 4)
    padding: int = 2
    heads: int = 3
    width: int = 5
    dtype: Any = jnp.float32
    sorted: bool = False
    chunk: int | None = None
    spread: float = 1.0
    schedule: tuple[int, int, int] | None = (2, 4, 1)  # rows, entries, warps
    unused_chunks: int = 1
    nodes: int = 11
    ordered: bool = False  # rows in an order of their own
    row_scaled: bool = False  # rows read and written in 16 bits

    @property
    def entries(self) -> int:
        return sum(self.degrees) + self.padding

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        h, d, rows = self.heads, self.width, len(self.degrees)
        a: dict[str, Any] = {
            "score": rng.standard_normal((self.entries, h)) * self.spread,
            "z": rng.standard_normal((self.nodes, h, d)),
            "bias": rng.standard_normal((rows, h)),
            "gain": rng.standard_normal((h, d)),
            "x": rng.standard_normal((self.nodes, d)),
            "weight": rng.standard_normal(self.entries),
            "scalar": rng.standard_normal(()),
        }
        a = {name: np.asarray(value, jnp.dtype(self.dtype)) for name, value in a.items()}
        degrees = np.array(self.degrees)
        if self.ordered:
            a["row_order"] = rng.permutation(rows).astype(np.int32)
            degrees = degrees[a["row_order"]]
        a["offsets"] = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
        a["index"] = rng.integers(0, self.nodes, self.entries).astype(np.int32)
        order = np.arange(self.entries) if self.sorted else rng.permutation(self.entries)
        a["order"] = order.astype(np.int32)
        a["index"][order[sum(self.degrees) :]] = self.nodes  # padding entries: out of range
        if self.chunk is not None:
            a["chunks"] = chunk_arrays(a["offsets"], self.chunk, self.unused_chunks)
            if self.ordered:  # positions are those of the permuted rows
                a["chunks"][0] = np.append(a["row_order"], rows).astype(np.int32)[a["chunks"][0]]
        return a

    def run(self, a: dict[str, Any], interpret: bool | None = None) -> tuple[tuple, tuple]:
        kind, h, d = self.kind, self.heads, self.width
        entry, indexed, row, shared = (kernels.TileOperand(s, 0 if s == "indexed" else None) for s in
                                      ("entry", "indexed", "row", "shared"))  # fmt: skip
        segments = kernels.RowSegments(
            offsets=a["offsets"],
            num_entries=self.entries,
            num_rows=len(self.degrees),
            order=None if self.sorted else a["order"],
            row_order=a["row_order"] if self.ordered else None,
            long_segments=None if self.chunk is None else kernels.LongSegmentTable(self.chunk, *a["chunks"]),
        )
        options: dict[str, Any] = {"segments": segments, "index_tables": [a["index"]], "interpret": interpret}
        if self.schedule is not None:
            options["schedule"] = kernels.TraversalSchedule(*self.schedule, 1)
        row_scaled = (0,) if self.row_scaled else ()
        f32 = jnp.float32
        if kind == "attention":

            def body(score, z, bias, gain):
                s = jnp.where(score + bias > 0, score + bias, 0.2 * (score + bias))
                return (s, jnp.ones((1, 1, 1), f32), z * gain), (s,)

            def epilogue(accs, tiles):
                top, total, mixed = accs
                safe = jnp.where(total > 0, total, 1.0)
                return mixed / safe[:, :, None] + tiles[0][:, :, None], top, total

            return kernels.traverse(
                body,
                epilogue,
                [a["score"], a["z"], a["bias"], a["gain"]],
                [entry, indexed, row, shared],
                reductions=[
                    kernels.Reduction("max", (h,)),
                    kernels.Reduction("weighted", (h,), 0),
                    kernels.Reduction("weighted", (h, d), 0),
                ],
                outputs=kernels.Outputs(
                    row_scaled=row_scaled, entries=[((h,), f32)], rows=[((h, d), self.dtype), ((h,), f32), ((h,), f32)]
                ),
                **options,
            )
        if kind in ("sum", "max"):
            return kernels.traverse(
                lambda x, weight: ((x * weight[:, :, None],), ()),
                None,
                [a["x"], a["weight"]],
                [indexed, entry],
                reductions=[kernels.Reduction(kind, (d,))],
                outputs=kernels.Outputs(row_scaled=row_scaled, rows=[((d,), self.dtype)]),
                **options,
            )
        if kind == "positioned":
            options["index_tables"] = [a["index"][a["order"]]]
            x = encode(jnp.asarray(a["x"])) if self.row_scaled else a["x"]
            return kernels.traverse(
                lambda x, scalar: ((x * scalar,), ()),
                None,
                [x, a["scalar"]],
                [kernels.TileOperand("positioned", 0), shared],
                reductions=[kernels.Reduction("sum", (d,))],
                outputs=kernels.Outputs(row_scaled=row_scaled, rows=[((d,), self.dtype)]),
                **options,
            )
        if kind == "edges":

            def edge_body(x, score, bias):
                inside = kernels.feature_mask((d,), 0)
                norm = jnp.sum(x * x if inside is None else jnp.where(inside, x * x + 1, 0.0), axis=2)
                norm = norm if inside is not None else norm + d
                return (), (norm, score + bias)

            return kernels.traverse(
                edge_body,
                None,
                [a["x"], a["score"], a["bias"]],
                [indexed, entry, row],
                outputs=kernels.Outputs(row_scaled=row_scaled, entries=[((), f32), ((h,), self.dtype)]),
                **options,
            )
        if kind == "columns":
            columns = jnp.concatenate([jnp.asarray(a["weight"])[:, None], jnp.asarray(a["score"])], axis=1)
            scalar, scores = (kernels.TileOperand("entry", columns=c) for c in ((0, ()), (1, (h,))))
            return kernels.traverse(
                lambda x, w, s: ((x * w[:, :, None],), ((w[:, :, None], 2 * w[:, :, None]), (s, s + w[:, :, None]))),
                None,
                [a["x"], columns, columns],
                [indexed, scalar, scores],
                reductions=[kernels.Reduction("sum", (d,))],
                outputs=kernels.Outputs(
                    row_scaled=row_scaled, rows=[((d,), self.dtype)], entries=[((2,), f32), ((2 * h,), self.dtype)]
                ),
                **options,
            )
        if kind == "scalars":
            return kernels.traverse(
                lambda w, c: ((w * c, w), (w + c,)),
                lambda accs, tiles: (accs[0] + tiles[0], accs[1]),
                [a["weight"], a["scalar"]],
                [entry, shared],
                reductions=[kernels.Reduction("sum", ()), kernels.Reduction("max", ())],
                outputs=kernels.Outputs(row_scaled=row_scaled, entries=[((), f32)], rows=[((), f32), ((), f32)]),
                **options,
            )
        raise AssertionError(kind)

    def reference(self, a: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        kind, h, d, rows = self.kind, self.heads, self.width, len(self.degrees)
        f = {n: a[n].astype(np.float64) for n in ("score", "z", "bias", "gain", "x", "weight", "scalar")}
        place = np.argsort(a["row_order"]) if self.ordered else np.arange(rows)
        members = [a["order"][a["offsets"][p] : a["offsets"][p + 1]] for p in place]
        source = np.minimum(a["index"], self.nodes - 1)
        if kind == "attention":
            mixed, top, total = np.zeros((rows, h, d)), np.zeros((rows, h)), np.zeros((rows, h))
            entry = np.zeros((self.entries, h))
            for r, m in enumerate(members):
                if len(m):
                    s = f["score"][m] + f["bias"][r]
                    s = entry[m] = np.where(s > 0, s, 0.2 * s)
                    top[r] = s.max(0)
                    p = np.exp(s - top[r])
                    total[r] = p.sum(0)
                    mixed[r] = np.einsum("eh,ehd->hd", p / total[r], f["z"][source[m]] * f["gain"])
            return [mixed + f["bias"][:, :, None], top, total], [entry]
        if kind in ("sum", "max"):
            value = f["x"][source] * f["weight"][:, None]
            reduce = np.sum if kind == "sum" else np.max
            return [np.stack([reduce(value[m], axis=0) if len(m) else np.zeros(d) for m in members])], []
        if kind == "positioned":
            return [np.stack([f["x"][source[m]].sum(0) * f["scalar"] for m in members])], []
        valid = np.zeros(self.entries, bool)
        owner = np.zeros(self.entries, int)
        for r, m in enumerate(members):
            valid[m], owner[m] = True, r
        if kind == "edges":
            norm = (f["x"][source] ** 2).sum(1) + d
            return [], [np.where(valid, norm, 0), np.where(valid[:, None], f["score"] + f["bias"][owner], 0)]
        if kind == "columns":
            value, weight = f["x"][source] * f["weight"][:, None], f["weight"][:, None]
            found = weight * [1, 2], np.concatenate([f["score"], f["score"] + weight], axis=1)
            return [np.stack([value[m].sum(0) for m in members])], [np.where(valid[:, None], v, 0) for v in found]
        sums = np.array([f["weight"][m].sum() for m in members]) * f["scalar"] + f["scalar"]
        tops = np.array([f["weight"][m].max() if len(m) else 0 for m in members])
        return [sums, tops], [np.where(valid, f["weight"] + f["scalar"], 0)]

    def check(self, result: tuple[tuple, tuple], a: dict[str, np.ndarray], tolerance: float | None = None) -> None:
        for got, expected in zip(result, self.reference(a), strict=True):
            assert len(got) == len(expected)
            for g, e in zip(got, expected, strict=True):
                if isinstance(g, kernels.RowScaled):
                    assert_close(decoded(g), e, False, tolerance or TF32)
                else:
                    assert_close(g, e, g.dtype != jnp.float32, tolerance)


def chunk_arrays(offsets: np.ndarray, chunk: int, unused: int) -> np.ndarray:
    """int32[5, chunks], the arrays of a `LongSegmentTable`, with `unused` chunks last."""
    found = []
    for row, (first, last) in enumerate(itertools.pairwise(offsets)):
        starts = range(first, last, chunk) if last - first > chunk else ()
        found += [(row, s, min(s + chunk, last), len(found), len(starts)) for s in starts]
    found += [(len(offsets) - 1, 0, 0, 0, 0)] * unused
    return np.array(found, np.int32).reshape(-1, 5).T.copy()


TRAVERSALS = {
    "attention": Traversal(),
    "attention, one row a program": Traversal(schedule=(1, 1, 1)),
    "attention, long segments": Traversal(chunk=4),
    "attention, long segments, two warps": Traversal(heads=2, width=32, chunk=4, schedule=(4, 2, 2)),
    "attention, long segments, sorted": Traversal(chunk=2, sorted=True, unused_chunks=0),
    "attention, large scores": Traversal(spread=1e4),
    "attention, large scores, long segments": Traversal(spread=1e4, chunk=4),
    "attention, large scores, long segments of many chunks": Traversal(
        spread=1e4, degrees=(3, 150, 9, 128, 0, 275), chunk=2
    ),
    "max, long segments of many chunks": Traversal(kind="max", width=3, degrees=(3, 150, 9, 128, 0, 275), chunk=2),
    "attention, bfloat16, long segments": Traversal(dtype=jnp.bfloat16, chunk=4),
    "attention, one head": Traversal(heads=1, width=17),
    "attention, eight heads": Traversal(heads=8, width=3, schedule=None),
    "attention, no entries": Traversal(degrees=(0, 0, 0), padding=3),
    "attention, no padding, sorted": Traversal(padding=0, sorted=True, schedule=None),
    "sum": Traversal(kind="sum", width=17),
    "sum, width 1": Traversal(kind="sum", width=1),
    "sum, width 100, long segments": Traversal(kind="sum", width=100, chunk=5, schedule=None),
    "sum, bfloat16": Traversal(kind="sum", width=16, dtype=jnp.bfloat16),
    "positioned, long segments": Traversal(kind="positioned", chunk=4),
    "max, long segments": Traversal(kind="max", width=3, chunk=4),
    "edges": Traversal(kind="edges"),
    "edges, width 16, long segments": Traversal(kind="edges", width=16, chunk=4),
    "edges, bfloat16": Traversal(kind="edges", dtype=jnp.bfloat16),
    "columns": Traversal(kind="columns"),
    "columns, long segments, rows ordered": Traversal(kind="columns", heads=1, width=17, chunk=4, ordered=True),
    "columns, bfloat16": Traversal(kind="columns", heads=4, dtype=jnp.bfloat16),
    "scalars": Traversal(kind="scalars"),
    "scalars, long segments": Traversal(kind="scalars", chunk=3, sorted=True),
    "one row": Traversal(degrees=(7,), chunk=2, schedule=(4, 2, 1)),
    "attention, long segments, rows ordered": Traversal(chunk=4, ordered=True),
    "attention, row-scaled written": Traversal(chunk=4, row_scaled=True, heads=3, width=5),
    "attention, row-scaled written longer": Traversal(chunk=4, row_scaled=True, heads=2, width=20),
    "positioned, row-scaled, long segments, rows ordered": Traversal(
        kind="positioned", width=17, chunk=4, ordered=True, row_scaled=True
    ),
    "positioned, row-scaled of 100": Traversal(kind="positioned", width=100, row_scaled=True, schedule=None),
}


def scaled(case: Any, **changes: Any) -> Any:
    return replace(case, **changes)
