"""The level-1 operators of a traversal on tiles in registers: what its template calls for rows and for entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

import dejax.pallas as kernels
from dejax.pallas.formats.row_scaled import inverse_of
from dejax.pallas.traversal.factored import max_axis, product, quotient, reshaped, scaled, sum_axis, whole
from dejax.rgnn.ir.inter import ELEMENTWISE, OPERATORS, Op, OpProgram
from dejax.rgnn.ir.intra import Accumulator, Traversal
from dejax.rgnn.ir.products import with_axes
from dejax.rgnn.ir.templates import ONCE_A_SEGMENT
from dejax.rgnn.lowering.factors import WithoutFactors


class TileProgram:
    """The level-1 operators of a traversal on tiles: [rows, entries, *features], features padded to powers of two.

    Rows in 16 bits come without the powers of two of their columns. Those are tiles by themselves, after the operands.

    Attributes:
      columns: for an operand of entries without its powers, the number of the tile that has the powers. For an operand
        by row, under its name or (its name, name of the operand whose powers it has, too), the number of the tile that
        has been multiplied by the powers.
      without: values that are computed without those powers, and the sums that are multiplied by them.
      stored: for each value that is stored without its powers, the number of the tile that has them.
    """

    def __init__(
        self,
        program: OpProgram,
        t: Traversal,
        side_by_side: Sequence[tuple[int, ...]],
        row_scaled: frozenset[int] = frozenset(),
        columns: Mapping[Any, int] | None = None,
        without: WithoutFactors | None = None,
        stored: Mapping[int, int] | None = None,
    ) -> None:
        self.program, self.t, self.side_by_side = program, t, side_by_side
        self.row_scaled = row_scaled.intersection(t.entry_outputs)  # kept in 16 bits
        self.kept = {
            v for values in side_by_side if len(values) > 1 for v in values
        }  # in float32, whatever their dtype
        self.columns, self.stored = dict(columns or {}), dict(stored or {})
        self.without = without or WithoutFactors({}, {}, {}, frozenset())
        self.tiles: Sequence[Any] = ()  # of powers of two, of the traversal that is being traced

    def identity(self) -> tuple[Any, ...]:
        """What tells the functions of this object from others (`dejax.pallas.lowering.identity`)."""
        kept = self.row_scaled, self.columns, self.without, self.stored
        return self.program, self.t, tuple(self.side_by_side), kept

    def divided(self, value: int, tile: Any, tiles: Sequence[Any], lead: int) -> Any:
        """A value in its padded form, over the powers of two of its columns where it is stored so."""
        if value not in self.stored:
            return tile
        powers = tiles[self.stored[value]]
        return tile * inverse_of(reshaped(powers, (*powers.shape[:lead], *tile.shape[lead:])))

    def multiplied(self, env: dict[int, Any], tiles: Sequence[Any]) -> dict[int, Any]:
        """The operands by row times the powers of two of their columns."""
        return env | {n: tiles[self.columns[n]] for n in env.keys() & self.columns.keys() - self.without.values.keys()}

    def powers(self, name: int, tile: Any, tiles: Sequence[Any], lead: int) -> Any:
        """The powers of two of an operand's columns as those of a tile that has the same features."""
        powers = tiles[self.columns[name]]
        return reshaped(powers, (*powers.shape[:lead], *tile.shape[lead:]))

    def complete(self, value: int, env: dict[int, Any]) -> Any:
        """A value of a traversal's body times the powers of two that it lacks."""
        name = self.without.values.get(value)
        return env[value] if name is None else scaled(env[value], self.powers(name, env[value], self.tiles, 2))

    def arguments(self, i: int, env: dict[int, Any]) -> list[Any]:
        """An operator's arguments; powers of two that one lacks are the other's where that is an operand by row."""
        args, values = self.program.ops[i].args, self.without.values
        lacking = [a for a in args if a in values]
        if not lacking or i in values:
            return [env[a] for a in args]
        rows = self.without.rows
        if any((i, a) in rows for a in args):
            return [self.tiles[self.columns[a, rows[i, a]]] if (i, a) in rows else env[a] for a in args]
        return [self.complete(a, env) for a in args]

    def body(self, *tiles: Any) -> tuple[tuple, tuple]:
        names = [o.name for o in self.t.operands]
        self.tiles = tiles[len(names) :]
        env = self.multiplied(dict(zip(names, tiles, strict=False)), self.tiles)
        env = self.evaluate(env, self.t.body, 2)
        values = tuple(self.accumulated(a, env) for a in self.t.accumulators)
        return values, tuple(self.entry_output(found, env) for found in self.side_by_side)

    def entry_output(self, values: tuple[int, ...], env: dict[int, Any]) -> Any:
        """An entry output in its padded form, or a tuple of them to be stored side by side."""
        shapes = [self.program.ops[v].shape for v in values]
        found = [whole(self.complete(v, env)) for v in values]
        if len(values) == 1:
            return self.shaped(found[0], shapes[0], 2)
        return tuple(self.shaped(tile, shape or (1,), 2) for tile, shape in zip(found, shapes, strict=True))

    def entries(self, *tiles: Any) -> tuple:
        return self.body(*tiles)[1]

    def rows(self, totals: Sequence[Any], row_tiles: Sequence[Any]) -> tuple:
        row_operands = [o for o in self.t.operands if o.access in ONCE_A_SEGMENT]
        tiles = row_tiles[len(row_operands) :]
        env = self.multiplied(dict(zip((o.name for o in row_operands), row_tiles, strict=False)), tiles)
        env.update((a.out, self.rounded(a.out, v)) for a, v in zip(self.t.accumulators, totals, strict=True))
        for i in self.t.epilogue:
            for a in self.program.ops[i].args:
                if self.program.ops[a].name == "const" and a not in env:
                    env[a] = jnp.full((1,), self.program.ops[a].attr("value"), jnp.float32)
        env = self.evaluate(env, self.t.epilogue, 1)
        return tuple(self.row_output(v, env[v], tiles) for v in self.t.row_outputs)

    def row_output(self, value: int, tile: Any, tiles: Sequence[Any]) -> Any:
        """A row output in its padded form, or a tuple of them to be stored side by side."""
        op = self.program.ops[value]
        if op.name == "concat":
            shapes = [self.program.ops[a].shape for a in op.args]
            parts = [self.shaped(part, shape, 1) for part, shape in zip(tile, shapes, strict=True)]
            return tuple(self.divided(a, part, tiles, 1) for a, part in zip(op.args, parts, strict=True))
        return self.divided(value, self.shaped(tile, op.shape, 1), tiles, 1)

    def accumulated(self, a: Accumulator, env: dict[int, Any]) -> Any:
        ops = self.program.ops
        value = (lambda v: env[v]) if a.out in self.without.sums else (lambda v: self.complete(v, env))
        if a.kind == "ties":
            return self.shaped(jnp.ones((1, 1), jnp.float32), ops[a.out].shape, 2)
        if a.kind != "weighted":
            return self.shaped(value(a.value) if a.kind == "sum" else whole(value(a.value)), ops[a.out].shape, 2)
        score, shape = ops[a.value].shape, ops[a.out].shape
        if score != shape[: len(score)]:
            raise NotImplementedError(f"a score of shape {score} that weighs a value of shape {shape}")
        result: Any = jnp.ones((1, 1), jnp.float32)
        rank = 0
        for t in a.terms:
            factor = value(t.value)
            term_shape = ops[t.value].shape
            if term_shape:
                factor = reshaped(factor, (*factor.shape[:2], *with_axes(factor.shape[2:], t.inserts)))
                term_shape = with_axes(term_shape, t.inserts)
            left, right = _align(result, rank, factor, len(term_shape))
            result = product(left, right) if t.power > 0 else quotient(left, right)
            rank = max(rank, len(term_shape))
        return self.shaped(result, shape, 2)

    def shaped(self, tile: Any, shape: tuple[int, ...], lead: int) -> Any:
        """A tile in the padded form of a feature shape; leading axes of size 1 stay."""
        if tile.ndim == lead and shape:
            tile = reshaped(tile, (*tile.shape, *(1,) * len(shape)))
        padded = tuple(kernels.next_power_of_two(s) for s in shape)
        return tile if tile.shape[lead:] == padded else jnp.broadcast_to(whole(tile), (*tile.shape[:lead], *padded))

    def evaluate(self, env: dict[int, Any], body: Sequence[int], lead: int) -> dict[int, Any]:
        for i in body:
            op = self.program.ops[i]
            if op.name == "concat":  # written side by side, and read by nothing here
                env[i] = tuple(env[a] for a in op.args)
                continue
            args = self.arguments(i, env) if lead == 2 else [env[a] for a in op.args]
            env[i] = self.rounded(i, self.apply(op, args, lead))
        return env

    def rounded(self, value: int, tile: Any) -> Any:
        """What is written in fewer bits is used as it is written, so that all who read it see the same number.

        The gradient of a softmax is a difference that cancels; with one side rounded it would not.
        """
        dtype = jnp.dtype(self.program.ops[value].dtype)
        if value in self.row_scaled:
            shape = self.program.ops[value].shape
            tile = self.shaped(whole(tile), shape, tile.ndim - len(shape))
            return kernels.rounded(tile, shape)
        if value not in self.t.writes or value in self.kept or dtype == jnp.float32:
            return tile
        tile = whole(tile)
        return tile.astype(dtype).astype(jnp.float32)

    def apply(self, op: Op, args: list[Any], lead: int) -> Any:
        """The tile of an operator's result, from the tiles of its operands, which have `lead` axes before features."""
        shapes = [self.program.ops[a].shape for a in op.args]
        name = op.name
        factored = any(isinstance(a, kernels.Factored) for a in args)
        if factored and name not in ("mul", "div", "dot", "sum_features", "reshape"):
            args = [whole(a) for a in args]
        if name == "const":
            return jnp.full((1,) * lead, op.attr("value"), jnp.float32)
        if name in ELEMENTWISE:
            rank = len(op.shape)
            aligned = [
                reshaped(a, (*a.shape, *(1,) * (rank - len(s)))) if s == () and rank else a
                for a, s in zip(args, shapes, strict=True)
            ]
            operator = OPERATORS[name]
            form = operator.tile or operator.form
            assert form is not None
            return form(*aligned, **dict(op.attrs))
        x = args[0]
        if name == "dot":
            return sum_axis(product(x, args[1]), lead + len(shapes[0]) - 1, shapes[0][-1])
        if name == "sum_features":
            for axis in sorted(op.attr("axes"), reverse=True):
                x = sum_axis(x, lead + axis, shapes[0][axis], keepdims=op.attr("keepdims"))
            return x
        if name == "extremum_features":
            return _extremum(op, x, shapes[0], lead, keepdims=op.attr("keepdims"))
        if name == "extremum_share":
            chosen = (x == _extremum(op, x, shapes[0], lead, keepdims=True)) | (x != x)  # NaN is any extremum
            chosen = chosen.astype(jnp.float32)
            ties = chosen
            for axis in op.attr("axes"):
                ties = sum_axis(ties, lead + axis, shapes[0][axis], keepdims=True)
            return chosen / ties
        if name == "reshape":
            return reshaped(x, (*x.shape[:lead], *(kernels.next_power_of_two(s) for s in op.shape)))
        if name == "broadcast":
            return self.shaped(x, op.shape, lead)
        if name == "linear":
            return _vector_linear(op.attr("spec"), x, args[1], shapes[1], lead)
        raise NotImplementedError(f"operator {name!r} has no tile form")


def _extremum(op: Op, x: Any, shape: tuple[int, ...], lead: int, *, keepdims: bool) -> Any:
    """The largest or smallest number over feature axes."""
    sign = 1.0 if op.attr("op") == "max" else -1.0
    x = x * sign
    for axis in sorted(op.attr("axes"), reverse=True):
        x = max_axis(x, lead + axis, shape[axis], keepdims=keepdims)
    return x * sign


def _align(x: Any, x_rank: int, y: Any, y_rank: int) -> tuple[Any, Any]:
    rank = max(x_rank, y_rank)
    expand = lambda a, r: reshaped(a, (*a.shape, *(1,) * (rank - r))) if r == 0 and rank else a  # noqa: E731
    return expand(x, x_rank), expand(y, y_rank)


def _vector_linear(spec: str, x: Any, w: Any, w_shape: tuple[int, ...], lead: int) -> Any:
    last = lead + len(w_shape) - 1
    if spec in ("k,k->", "hk,hk->h"):
        return sum_axis(x * w, last, w_shape[-1])
    if spec == "k,hk->h":
        return sum_axis(jnp.expand_dims(x, lead) * w, last, w_shape[-1])
    vectors = jnp.expand_dims(x, x.ndim) * w  # ",k->k", "h,hk->hk"
    return sum_axis(vectors, lead, w_shape[0]) if spec == "h,hk->k" else vectors
