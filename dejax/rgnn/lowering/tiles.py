"""The level-1 operators of a traversal on tiles in registers: what its template calls for rows and for items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import dejax.pallas as kernels
from dejax.pallas.factored import max_axis, product, quotient, reshaped, sum_axis, whole
from dejax.rgnn.ir.inter import Op, Program
from dejax.rgnn.ir.intra import BY_ROW, Accumulator, Traversal
from dejax.rgnn.lowering.xla import ELEMENTWISE


class TileProgram:
    """The level-1 operators of a traversal on tiles: [rows, items, *features], features padded to powers of two."""

    def __init__(
        self, program: Program, t: Traversal, together: Sequence[tuple[int, ...]], half: frozenset[int] = frozenset()
    ) -> None:
        self.program, self.t, self.together = program, t, together
        self.half = half.intersection(t.item_outputs)  # kept in 16 bits
        self.kept = {v for values in together if len(values) > 1 for v in values}  # in float32, whatever their dtype

    def body(self, *tiles: Any) -> tuple[tuple, tuple]:
        env = self.evaluate(dict(zip((o.name for o in self.t.operands), tiles, strict=True)), self.t.body, 2)
        values = tuple(self.accumulated(a, env) for a in self.t.accumulators)
        return values, tuple(self.item_output(found, env) for found in self.together)

    def item_output(self, values: tuple[int, ...], env: dict[int, Any]) -> Any:
        """An item output in its padded form, or a tuple of them to be stored side by side."""
        shapes = [self.program.ops[v].shape for v in values]
        if len(values) == 1:
            return self.shaped(whole(env[values[0]]), shapes[0], 2)
        return tuple(self.shaped(whole(env[v]), shape or (1,), 2) for v, shape in zip(values, shapes, strict=True))

    def items(self, *tiles: Any) -> tuple:
        return self.body(*tiles)[1]

    def rows(self, totals: Sequence[Any], row_tiles: Sequence[Any]) -> tuple:
        row_operands = [o for o in self.t.operands if o.access in BY_ROW]
        env = dict(zip((o.name for o in row_operands), row_tiles, strict=True))
        env.update((a.out, self.rounded(a.out, v)) for a, v in zip(self.t.sums, totals, strict=True))
        for i in self.t.epilogue:
            for a in self.program.ops[i].args:
                if self.program.ops[a].name == "const" and a not in env:
                    env[a] = jnp.full((1,), self.program.ops[a].attr("value"), jnp.float32)
        env = self.evaluate(env, self.t.epilogue, 1)
        return tuple(self.row_output(v, env[v]) for v in self.t.row_outputs)

    def row_output(self, value: int, tile: Any) -> Any:
        """A row output in its padded form, or a tuple of them to be stored side by side."""
        op = self.program.ops[value]
        if op.name == "concat":
            return tuple(self.shaped(part, self.program.ops[a].shape, 1) for part, a in zip(tile, op.args, strict=True))
        return self.shaped(tile, op.shape, 1)

    def accumulated(self, a: Accumulator, env: dict[int, Any]) -> Any:
        ops = self.program.ops
        if a.kind != "weighted":
            return self.shaped(env[a.value] if a.kind == "sum" else whole(env[a.value]), ops[a.out].shape, 2)
        score, shape = ops[a.value].shape, ops[a.out].shape
        if score != shape[: len(score)]:
            raise NotImplementedError(f"a score of shape {score} that weighs a value of shape {shape}")
        result: Any = jnp.ones((1, 1), jnp.float32)
        rank = 0
        for t in a.terms:
            factor = env[t.value]
            term_shape = ops[t.value].shape
            for axes in t.inserts if term_shape else ():
                for axis in axes:
                    factor = reshaped(factor, (*factor.shape[: 2 + axis], 1, *factor.shape[2 + axis :]))
                    term_shape = (*term_shape[:axis], 1, *term_shape[axis:])
            left, right = _align(result, rank, factor, len(term_shape), 2)
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
            env[i] = self.rounded(i, self.apply(op, [env[a] for a in op.args], lead))
        return env

    def rounded(self, value: int, tile: Any) -> Any:
        """What is written in fewer bits is used as it is written, so that all who read it see the same number.

        The gradient of a softmax is a difference that cancels; with one side rounded it would not.
        """
        dtype = jnp.dtype(self.program.ops[value].dtype)
        if value in self.half:
            shape = self.program.ops[value].shape
            return kernels.rounded(self.shaped(whole(tile), shape, tile.ndim - len(shape)), shape)
        if value not in self.t.writes or value in self.kept or dtype == jnp.float32:
            return tile
        tile = whole(tile)
        return tile.astype(dtype).astype(jnp.float32)

    def apply(self, op: Op, args: list[Any], lead: int) -> Any:
        shapes = [self.program.ops[a].shape for a in op.args]
        name = op.name
        factored = any(isinstance(a, kernels.Factored) for a in args)
        if factored and name not in ("mul", "div", "dot", "sum_features", "reshape"):
            args = [whole(a) for a in args]
        if name == "const":
            return jnp.full((1,) * lead, op.attr("value"), jnp.float32)
        if name == "erf":
            return kernels.erf(args[0])
        if name == "exp":
            return kernels.exp(args[0])
        if name == "softplus":
            return jnp.maximum(args[0], 0.0) + jnp.log1p(kernels.exp(-jnp.abs(args[0])))
        if name in ELEMENTWISE:
            rank = len(op.shape)
            aligned = [
                reshaped(a, (*a.shape, *(1,) * (rank - len(s)))) if s == () and rank else a
                for a, s in zip(args, shapes, strict=True)
            ]
            if name == "mul":
                return product(*aligned)
            if name == "div":
                return quotient(*aligned)
            return ELEMENTWISE[name](op, *aligned)
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
            chosen = (x == _extremum(op, x, shapes[0], lead, keepdims=True)).astype(jnp.float32)
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


def _align(x: Any, x_rank: int, y: Any, y_rank: int, lead: int) -> tuple[Any, Any]:
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
