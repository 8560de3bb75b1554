"""The kernel instances that were traced, by the name under which profiles show them: for `dejax.report`."""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.compiler.failures import failures
from dejax.rgnn.cost.model import Cost
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.intra import Fallback, Kernels, user_lines
from dejax.rgnn.options import Options
from dejax.rgnn.passes.kernels.predicted import cost_model

_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """One instance of a program as it was traced last.

    Attributes:
        kernels: the level-2 program.
        number: the number of the instance.
        counts: numbers of nodes, edges and types of the graph.
        options: the options of the compiler.
        row_scaled: inputs that came as row-scaled float16.
    """

    kernels: Kernels
    number: int
    counts: Counts
    options: Options
    row_scaled: frozenset[int]

    @property
    def program(self) -> str:
        """Name of the program."""
        return self.kernels.program.name

    @property
    def template(self) -> str:
        """Name of the template; "xla" where none computes it."""
        return self.kernels.instances[self.number].template

    @property
    def lines(self) -> list[str]:
        """Lines of the user's program."""
        return user_lines(self.kernels.program, self.kernels.instances[self.number])

    def why_xla(self) -> str:
        """Why no kernel computes it; "" where one does."""
        instance = self.kernels.instances[self.number]
        if isinstance(instance, Fallback):
            return instance.why or "no template computes these operators"
        return failures(self.kernels, self.options).get(self.number, "")

    def cost(self) -> Cost:
        """Bytes, operations, and the time that the cost model predicts for an NVIDIA H200."""
        precision = self.options.precision or "tf32"
        return cost_model(self.kernels, self.counts, precision, self.row_scaled).costs()[self.number]


_traced: dict[str, TracedKernel] = {}


def note(label: str, kernel: TracedKernel) -> None:
    """Remembers an instance under its name in profiles."""
    _traced[label] = kernel
    while len(_traced) > _LIMIT:
        _traced.pop(next(iter(_traced)), None)


def traced() -> dict[str, TracedKernel]:
    """The instances by the name under which profiles show them."""
    return dict(_traced)
