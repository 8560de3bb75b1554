"""Prints the equations of a jaxpr by the rules of their primitives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from dejax.pallas.lowering.shapes import literal

Rule = Callable[["Printer", Any, list[str]], list[str]]
"""Prints an equation, given the texts of its operands, and gives those of its results."""


@dataclass(frozen=True)
class Reference:
    """The layout of the elements of a kernel's operand."""

    strides: list[int]
    wide: bool
    """Whether offsets need 64 bits."""


class Printer:
    """The lines of a function's body.

    Args:
      rules: the rules, by primitive.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self.lines: list[str] = []
        self.program_ids: list[str] = []
        self.references: dict[str, Reference] = {}
        self.squeezed: dict[str, tuple[str, int, str]] = {}
        """Reductions of a last axis of size 1: operand, axis and function."""
        self.merged: dict[int, tuple[int, ...]] = {}
        """Sizes of axes that a reshape has merged, by the size of what they became."""
        self._depth = 1
        self._names = 0

    def line(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)

    def name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def let(self, expression: str) -> str:
        """A new name for the value of an expression."""
        name = self.name()
        self.line(f"{name} = {expression}")
        return name

    def let_all(self, names: Sequence[str], values: Sequence[str]) -> None:
        for name, value in zip(names, values, strict=True):
            self.line(f"{name} = {value}")

    def block(self, head: str, body: Callable[[], None]) -> None:
        """A statement with an indented block, which is printed by `body`."""
        self.line(head)
        self._depth += 1
        before = len(self.lines)
        body()
        if len(self.lines) == before:
            self.line("pass")
        self._depth -= 1

    def equations(self, jaxpr: Any, arguments: Sequence[str]) -> list[str]:
        """Prints a jaxpr, closed or not, and gives the texts of its results."""
        if getattr(jaxpr, "consts", ()):
            raise NotImplementedError("a kernel's jaxpr with constants")
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(x: Any) -> str:
            return literal(x.val, x.aval.dtype) if isinstance(x, Literal) else known[x]

        for equation in jaxpr.eqns:
            rule = self._rules.get(equation.primitive.name)
            if rule is None:
                raise NotImplementedError(f"the primitive {equation.primitive.name} in a kernel")
            results = rule(self, equation, [read(x) for x in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]
