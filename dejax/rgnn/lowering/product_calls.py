"""Grouped GEMMs and grouped weight gradients as calls of their templates."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dejax.pallas as kernels
from dejax.pallas._shapes import next_power_of_two
from dejax.pallas.formats.row_scaled import of_stored, stored
from dejax.pallas.products.grouped_gemm import MAX_ROW_SCALED_N
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.ir.intra import Gemm, Operand, RowProducts, WeightGradient
from dejax.rgnn.ir.row_sums import row_sums
from dejax.rgnn.ir.templates import by_head
from dejax.rgnn.lowering.running import Running, decoded
from dejax.rgnn.lowering.segments import segments, valid_rows


class Products(Running):
    """The instances of products."""

    def row_index(self, operand: Operand, group: Segments) -> jax.Array | None:
        """For each position in the order of types, the row of the array; None where it is the position."""
        index = segments(self.graph, operand.via).index if operand.access == "gathered" and operand.via else None
        if operand.access == "shared":
            index = jnp.zeros((group.num_entries,), jnp.int32)
        if group.order is None:
            return index
        return group.order if index is None else index[group.order]

    def gemm(self, instance: Gemm, env: dict[int, Any]) -> tuple[Any, ...]:
        """The result of a grouped GEMM and, where it has one, of the inner product in its epilogue."""
        op = self.program.ops[instance.out]
        group = segments(self.graph, instance.via)
        x, w = self.narrow_rows_of(instance.x, env), env[instance.w]
        x_columns = None
        if self.scales_rows_of(instance) and not isinstance(x, kernels.RowScaled) and x.dtype == jnp.float32:
            x_columns = self.scales.powers(instance.x.value, jnp.float32)
        # Row-scaled float16 of several heads has zeros after each head: the matrices get columns of zeros.
        heads_of = stored(op.shape) if self.makes_heads_stored(instance) else op.shape
        if heads_of != op.shape:
            w = jnp.pad(w, ((0, 0), (0, 0), (0, 0), (0, heads_of[-1] - op.shape[-1])))
        x, w, transpose, split = _as_grouped_gemm(instance.spec, x, w)
        x_index = self.row_index(instance.x, group)
        epilogue = self._epilogue(instance, env, (w.shape[0], *x.shape[1:-1], w.shape[-2 if transpose else -1]))
        output = self._output(instance, group, heads_of)

        def tiles(block: int) -> tuple[jax.Array, jax.Array]:
            table = group.tiles_for(block, near=x_index is not None)
            return table.row_type, table.start

        groups = kernels.GemmGroups(group.offsets, group.num_entries, tiles)
        request = kernels.GroupedGemm(x, w, groups, x_index, x_columns, transpose, epilogue, output, self.precision)
        result = kernels.grouped_gemm(request, interpret=self.interpret)
        found = [result] if instance.dot is None else list(result)
        found = self.cleared(self.program.ops[instance.product].space, found, [(v,) for v in instance.writes])
        if split:
            found[0] = self._with_heads(found[0].reshape(output.num_rows, *heads_of), instance)
        if instance.dot is not None:
            found[1] = found[1].reshape(output.num_rows, *self.program.ops[instance.dot].shape)
        return tuple(found)

    def _epilogue(self, instance: Gemm, env: dict[int, Any], by_type: tuple[int, ...]) -> kernels.GemmEpilogue:
        """`by_type` is the shape of a bias: types, heads if there are some, columns."""
        bias, vector = (None if v is None else env[v].reshape(by_type) for v in (instance.bias, instance.vector))
        heads = 1 if instance.dot is None else self.program.ops[instance.dot].width // math.prod(by_type[1:-1])
        return kernels.GemmEpilogue(bias=bias, activation=instance.activation, dot_vector=vector, dot_parts=heads)

    def _output(self, instance: Gemm, group: Segments, heads_of: tuple[int, ...]) -> kernels.GemmOutput:
        """Where and how the result is stored; `heads_of` is the feature shape with the zeros after each head."""
        op = self.program.ops[instance.out]
        columns = self.scales.powers(instance.out) if instance.out in self.row_scaled else None
        if columns is not None and heads_of != op.shape:
            behind = [(0, longer - size) for longer, size in zip(heads_of, op.shape, strict=True)]
            columns = jnp.pad(columns, behind, constant_values=1)
        return kernels.GemmOutput(
            index=group.order,
            num_rows=group.num_entries,
            covers_all=True,
            dtype=jnp.dtype(op.dtype),
            row_scaled=instance.out in self.row_scaled,
            columns=columns,
        )

    def _with_heads(self, y: Any, instance: Gemm) -> Any:
        """A result with its head axis, without the zeros after each head."""
        shape = self.program.ops[instance.out].shape
        if y.shape[1:] == shape:
            return y
        if isinstance(y, kernels.RowScaled):
            return of_stored(y.mantissa, y.exponent, shape, self.scales.powers(instance.out))
        return y[..., : shape[-1]]

    def makes_heads_stored(self, instance: Gemm) -> bool:
        """Whether the result of a product is rows of heads in 16 bits whose zeros a tile has columns for."""
        shape = self.program.ops[instance.out].shape
        linear = instance.bias is None and instance.vector is None and instance.activation is None
        if not (linear and instance.out in self.row_scaled and instance.spec == "k,hkn->hn") or shape[0] == 1:
            return False
        n, longer = (next_power_of_two(math.prod(s)) for s in (shape, stored(shape)))
        return n == longer <= MAX_ROW_SCALED_N

    def weight_gradient(self, instance: WeightGradient, env: dict[int, Any]) -> tuple[jax.Array, ...]:
        group = segments(self.graph, instance.via)
        x, y = (self.narrow_rows_of(o, env) for o in (instance.x, instance.y))
        heads = by_head(instance.spec)
        summed = heads and "h" not in instance.spec.split("->")[1]  # a product for each head, then their sum
        if not heads:  # zeros behind each head's features are features here
            x, y = (a.whole() if isinstance(a, kernels.RowScaled) and a.ndim > 2 else a for a in (x, y))
        lengths = x.shape[-1], y.shape[-1]
        # [rows, groups, width] on both sides; what is not a group is a width.
        shape = lambda a: (a.shape[0], a.shape[1] if heads else 1, int(np.prod(a.shape[2 if heads else 1 :])))  # noqa: E731
        x_index, y_index = self.row_index(instance.x, group), self.row_index(instance.y, group)
        gathered = x_index is not None or y_index is not None
        splits = group.near_splits if gathered and group.near_splits is not None else group.splits
        dtype = jnp.dtype(self.program.ops[instance.out].dtype)
        request = kernels.GroupedWeightGradient(
            x.reshape(shape(x)),
            y.reshape(shape(y)),
            group.offsets,
            group.num_entries,
            x_index=x_index,
            y_index=y_index,
            splits=None if splits is None else splits.tables,
            rows_per_split=None if splits is None else splits.rows_per_split,
            precision=self.precision,
            dtype=jnp.float32 if summed else dtype,
        )
        total = kernels.grouped_weight_gradient(request, interpret=self.interpret)
        return (self.as_contracted(total, instance.spec, instance.x, instance.y, lengths).astype(dtype),)

    def row_products(self, instance: RowProducts, env: dict[int, Any]) -> tuple[jax.Array, ...]:
        """The sums of products over the rows that are not padding, and of the rows of y.

        Where the rows of y are zeros but at destinations, the others are not read.
        """
        ops, sums = self.program.ops, row_sums(self.program, instance.outs)
        y = decoded(self.rows.fewest(instance.y, env))
        rows, mask = y.shape[0], valid_rows(self.graph, ops[instance.y].space)
        first = sums[0]
        heads = () if first.heads_in_one_product else (first.size(first.heads),)
        xs = [decoded(self.rows.any_row(x, env)) for x in instance.xs]
        found = kernels.row_products(
            [x.reshape(x.shape[0], *heads, s.size(s.sides[0])) for x, s in zip(xs, sums, strict=True)],
            y.reshape(rows, *heads, first.size(first.sides[1])),
            total=instance.total is not None,
            mask=None if mask is None else mask[:rows],
            precision=self.precision,
            interpret=self.interpret,
        )
        results = []
        for product, s in zip(found, sums, strict=False):
            letters = s.left + s.right if s.heads_in_one_product else s.heads + "".join(s.one_head)
            # Where all heads were multiplied by all, only the products of a head with itself are wanted.
            results.append(jnp.einsum(f"{letters}->{s.out}", product.reshape([s.sizes[c] for c in letters])))
        if instance.total is not None:
            results.append(found[-1].reshape(ops[instance.y].shape))
        return tuple(r[None].astype(ops[v].dtype) for r, v in zip(results, instance.writes, strict=True))

    def as_contracted(self, total: jax.Array, spec: str, x: Operand, y: Operand, lengths: tuple[int, int]) -> jax.Array:
        """Sums of outer products [types, groups, width of x, width of y] with the axes of the contraction's result.

        `lengths` are those of the last axes of x and y as they were multiplied, which may be longer.
        """
        (left, right), result = spec.split("->")[0].split(","), spec.split("->")[1]
        heads = "h" if by_head(spec) else ""
        letters = heads + left.replace("h", "" if heads else "h") + right.replace("h", "" if heads else "h")
        sizes = dict(zip(left, self.program.ops[x.name].shape, strict=True))
        sizes |= dict(zip(right, self.program.ops[y.name].shape, strict=True))
        longer = dict(sizes) | {side[-1]: length for side, length in zip((left, right), lengths, strict=True) if side}
        total = total.reshape(total.shape[0], *(longer[c] for c in letters))
        if longer != sizes:
            total = total[:, *(slice(sizes[c]) for c in letters)]
        if heads and "h" not in result:
            total, letters = total.sum(1), letters[1:]
        return jnp.transpose(total, (0, *(1 + letters.index(c) for c in result)))


def _as_grouped_gemm(spec: str, x: Any, w: jax.Array) -> tuple[Any, jax.Array, bool, bool]:
    """A contraction as `grouped_gemm` takes it: (x, w, w is transposed, the result must be reshaped)."""
    rows, types = x.shape[0], w.shape[0]
    if spec in ("k,kn->n", "hk,hkn->hn"):
        return x, w, False, False
    if spec == "k,k->":
        return x, w[:, :, None], False, True
    if spec in ("n,kn->k", "hn,hkn->hk"):
        return x, w, True, False
    if spec == "k,hkn->hn":
        _, h, k, n = w.shape
        return x, jnp.transpose(w, (0, 2, 1, 3)).reshape(types, k, h * n), False, True
    if spec == "hn,hkn->k":
        _, h, k, n = w.shape
        if isinstance(x, kernels.RowScaled) and x.width is not None:  # zeros behind each head's features meet zeros
            x = x.whole()
            w = jnp.pad(w, ((0, 0), (0, 0), (0, 0), (0, x.shape[-1] - n)))
            n = x.shape[-1]
        return x.reshape(rows, h * n), jnp.transpose(w, (0, 2, 1, 3)).reshape(types, k, h * n), True, False
    heads = x.shape[1]
    wide = jnp.broadcast_to(w[:, None], (types, heads, *w.shape[1:]))
    return x, wide, spec == "hn,kn->hk", False
