"""Rules of calls, branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal

from dejax import _compat
from dejax.pallas.lowering.printer import Printer, Rule


def _call(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    p = equation.params
    return printer.equations(p.get("jaxpr") or p.get("call_jaxpr"), values)


def _cond(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    """Prints `cond` with two branches; the second one runs if the index is true or not 0."""
    index, *operands = values
    otherwise, then = equation.params["branches"]
    results = [printer.name() for _ in equation.outvars]

    def branch(jaxpr: Any) -> Callable[[], None]:
        return lambda: printer.let_all(results, printer.equations(jaxpr, operands))

    printer.block(f"if {index}:", branch(then))
    if getattr(otherwise, "jaxpr", otherwise).eqns or results:
        printer.block("else:", branch(otherwise))
    return results


def _loop(printer: Printer, head: str, carried: list[str], body: Callable[[], list[str]]) -> None:
    """Prints a loop whose carried names get the results of `body` in each step."""

    def step() -> None:
        printer.let_all(carried, [printer.let(value) for value in body()])

    printer.block(head, step)


def _carried(printer: Printer, initial: Sequence[str]) -> list[str]:
    return [printer.let(value) for value in initial]


def _scan(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    """Prints `scan` with a fixed number of steps, all of whose values are carried."""
    p = equation.params
    consts, count = _compat.scan_counts(equation)
    if count + consts != len(values) or count != len(equation.outvars) or p["reverse"]:
        raise NotImplementedError("a scan over arrays in a kernel")
    carried = _carried(printer, values[consts:])
    body = lambda: printer.equations(p["jaxpr"], [*values[:consts], *carried])  # noqa: E731
    _loop(printer, f"for {printer.name()} in range({p['length']}):", carried, body)
    return carried


def _while(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    p = equation.params
    first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    condition, constants, initial = values[:first], values[first:second], values[second:]
    if _counts(p):
        lower, upper, *rest = initial
        carried, index = _carried(printer, rest), printer.name()
        counted = lambda: printer.equations(p["body_jaxpr"], [*constants, index, upper, *carried])[2:]  # noqa: E731
        _loop(printer, f"for {index} in range({lower}, {upper}):", carried, counted)
        return [upper, upper, *carried]
    carried = _carried(printer, initial)
    holds = lambda: printer.equations(p["cond_jaxpr"], [*condition, *carried])  # noqa: E731
    flag = printer.let(*holds())

    def step() -> None:
        printer.let_all(carried, [printer.let(v) for v in printer.equations(p["body_jaxpr"], [*constants, *carried])])
        printer.let_all([flag], holds())

    printer.block(f"while {flag}:", step)
    return carried


def _counts(p: dict[str, Any]) -> bool:
    """Whether a `while` counts its first carried number up to its second, by 1."""
    condition, body = (getattr(j, "jaxpr", j) for j in (p["cond_jaxpr"], p["body_jaxpr"]))
    if p["cond_nconsts"] or len(condition.eqns) != 1 or len(condition.invars) < 2:
        return False
    (test,) = condition.eqns
    if test.primitive.name != "lt" or list(test.invars) != list(condition.invars[:2]):
        return False
    index, end = body.invars[p["body_nconsts"] :][:2]
    if body.outvars[1] is not end:
        return False
    following = [e for e in body.eqns if body.outvars[0] in e.outvars and e.primitive.name == "add"]
    return any(
        index in [x for x in e.invars if not isinstance(x, Literal)]
        and any(isinstance(x, Literal) and int(x.val) == 1 for x in e.invars)
        for e in following
    )


RULES: dict[str, Rule] = {
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
