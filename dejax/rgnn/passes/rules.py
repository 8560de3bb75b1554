"""Rewrite rules: a pattern of operators, a condition, and what replaces the operator at the pattern's root.

A pass that is a table of rules is applied until no rule matches:

    _SQUARE = Rule(Pat("pow", Var("x"), exponent=2.0), lambda b, m: b.op("square", m.new("x")))
    powers = rules(_SQUARE)                          # a pass: `powers(program, counts)`

Rules are for what one place of a program decides. Passes that weigh a program as a whole (`compact`, `stack_heads`,
`save`, fusion) are analyses, and walk it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import OPERATORS, Builder, Op, OpProgram
from dejax.rgnn.passes._rewrite import live, rebuild

Bound = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Attr:
    """Binds an attribute of an operator to a name; the same name elsewhere in the pattern must have the same value."""

    name: str


class Pat:
    """A value that one of some operators makes from arguments that match.

    Arguments of an operator that commutes match in either order. A name that is bound twice must be one value.

    Args:
      operators: names with spaces between; "" for any.
      args: patterns of the arguments; none if they do not matter.
      name: to which the value is bound.
      once: whether it must be read by one operator alone, and be no output.
      attrs: for each attribute the value that it must have, a predicate, or an `Attr`.
    """

    def __init__(self, operators: str, *args: Pat, name: str = "", once: bool = False, **attrs: Any) -> None:
        self.operators, self.args, self.name, self.once = frozenset(operators.split()), args, name, once
        self.attrs = attrs

    def found(self, values: Values, value: int, bound: Bound) -> Iterator[Bound]:
        """The ways in which a value matches; each is a dict of the names that it binds."""
        op = values.ops[value]
        if (self.operators and op.name not in self.operators) or (self.once and not values.read_once(value)):
            return
        names = {self.name: value} if self.name else {}
        for key, want in self.attrs.items():
            got = op.attr(key)
            if isinstance(want, Attr):
                names[want.name] = got
            elif not (want(got) if callable(want) else want == got):
                return
        if any(bound.get(name, got) != got for name, got in names.items()):
            return
        bound = {**bound, **names}
        if not self.args:
            yield bound
        elif len(op.args) == len(self.args):
            commutes = OPERATORS[op.name].commutes
            for order in (op.args, op.args[::-1]) if commutes else (op.args,):
                yield from self._arguments(values, order, bound)

    def _arguments(self, values: Values, order: tuple[int, ...], bound: Bound) -> Sequence[Bound]:
        ways: Sequence[Bound] = (bound,)
        for pattern, value in zip(self.args, order, strict=True):
            ways = [more for way in ways for more in pattern.found(values, value, way)]
        return ways


class Var(Pat):
    """A pattern that every value matches."""

    def __init__(self, name: str, once: bool = False) -> None:
        super().__init__("", name=name, once=once)


class Either(Pat):
    """A value that matches one of several patterns."""

    def __init__(self, *patterns: Pat) -> None:
        self.patterns = patterns

    def found(self, values: Values, value: int, bound: Bound) -> Iterator[Bound]:
        for pattern in self.patterns:
            yield from pattern.found(values, value, bound)


class Values:
    """The values of a program and who reads them; values that no output needs do not count as readers."""

    def __init__(self, program: OpProgram, counts: Counts) -> None:
        self.program, self.ops, self.outputs, self.counts = program, program.ops, program.outputs, counts

    @cached_property
    def live(self) -> set[int]:
        return live(self.program, self.outputs)

    @cached_property
    def users(self) -> list[list[int]]:
        return [[u for u in users if u in self.live] for users in self.program.users()]

    def read_once(self, value: int) -> bool:
        return len(self.users[value]) == 1 and value not in self.outputs


class Match:
    """The names that a pattern has bound. Conditions ask it for operators, replacements for values of the new program.

    Attributes:
      values: the program that is being rewritten.
      op: the operator at the root of the pattern.
    """

    def __init__(self, values: Values, op: Op, bound: Bound, new: Mapping[int, int]) -> None:
        self.values, self.counts, self.op, self._bound, self._new = values, values.counts, op, bound, new

    def __contains__(self, name: str) -> bool:
        return name in self._bound

    def __getitem__(self, name: str) -> Any:
        """The number of a value in the program that is being rewritten, or the attribute, that is bound to a name."""
        return self._bound[name]

    def at(self, name: str) -> Op:
        """The operator that makes a value."""
        return self.values.ops[self._bound[name]]

    def new(self, value: str | int) -> int:
        """A value in the new program, by the name to which it is bound or by its number in the old one."""
        return self._new[self._bound[value] if isinstance(value, str) else value]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.at(name).shape


@dataclass(frozen=True, slots=True)
class Rule:
    """What replaces an operator where a pattern matches and a condition holds.

    Attributes:
      pattern: its root is the operator.
      replace: (the builder of the new program, the match) -> the new value.
      where: the condition.
    """

    pattern: Pat
    replace: Callable[[Builder, Match], int]
    where: Callable[[Match], bool] = lambda match: True


def rules(*table: Rule) -> Callable[[OpProgram, Counts], OpProgram]:
    """Makes a pass that applies rules until none matches; of rules that match an operator, the first in the table."""
    of_root: dict[str, list[Rule]] = {}
    for rule in table:
        for name in rule.pattern.operators:
            of_root.setdefault(name, []).append(rule)

    def matched(values: Values, i: int, new: Mapping[int, int]) -> tuple[Rule, Match] | None:
        for rule in of_root.get(values.ops[i].name, ()):
            for bound in rule.pattern.found(values, i, {}):
                if rule.where(match := Match(values, values.ops[i], bound, new)) and i in values.live:
                    return rule, match
        return None

    def run(program: OpProgram, counts: Counts) -> OpProgram:
        for _ in range(_MOST_SWEEPS):
            values, new = Values(program, counts), dict[int, int]()
            found = {i: at for i in range(len(program.ops)) if (at := matched(values, i, new)) is not None}
            if not found:
                return program

            def visit(builder: Builder, op: Op, args: tuple[int, ...], i: int) -> int | None:
                return found[i][0].replace(builder, found[i][1]) if i in found else None  # noqa: B023

            program = rebuild(program, visit, new)
        raise RuntimeError(f"the rules still match after {_MOST_SWEEPS} sweeps over {program.name!r}")

    return run


# Each sweep brings what it rewrites nearer to its form; a program of more than this has rules that undo each other.
_MOST_SWEEPS = 100
