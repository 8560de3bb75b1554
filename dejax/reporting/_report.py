"""The report of one step in its forms."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejax.reporting import _html, _text
from dejax.reporting._figures import Figures
from dejax.reporting._picture import picture


@dataclass(frozen=True, slots=True)
class Report(Figures):
    """The costs of one call of a step, as `dejax.report` measures them.

    `print(report)` shows them as text, `save` writes a page as HTML, SVG or text, and `as_dict` returns plain values.

    Attributes:
        name: name of the step.
        device: name of the device, and versions.
        backend: "gpu" or "cpu".
        how: how the figures of kernels were found.
        leaves: the arrays of the arguments.
        timeline: bytes on the device by owner, in the order of execution.
        memory: XLA's own figures for memory, bytes by name.
        on_host: bytes of the arguments in host memory, by owner.
        kernels: the kernels, sorted by time.
        flops: floating-point operations of one call, counted by XLA; 0 if XLA does not tell.
        traffic: bytes over the bus and to the disk.
        waits: seconds that one call waits, by reason.
        idle: share of the time in which the device did nothing; None if it was not measured.
        seconds: wall time of one call; None if the step was not run.
        peak_bytes: largest size of the allocator's memory since the process began; None if the device does not tell.
        remedies: at most three pieces of advice.
        compiled: the functions that jax has compiled in this process so far, those that took longest first.

    >>> import dejax, jax, jax.numpy as jnp
    >>> step = jax.jit(lambda params, x: (x @ params).sum())
    >>> page = dejax.report(step, jnp.ones((8, 8)), jnp.ones((4, 8)), calls=0)
    >>> page.backend in ("cpu", "gpu"), page.flops > 0, len(page.leaves)
    (True, True, 2)
    """

    def __str__(self) -> str:
        return _text.render(self)

    def _repr_html_(self) -> str:
        return _html.render(self, whole=False)

    def save(self, path: str | Path) -> None:
        """Writes the report to a file: one HTML file if the name ends in `.html`, a picture for `.svg`, otherwise text.

        Raises:
            OSError: the file cannot be written.
        """
        suffix = Path(path).suffix.lower()
        forms = {".html": lambda: _html.render(self), ".svg": self.picture, ".json": lambda: self._json()}
        Path(path).write_text(forms.get(suffix, lambda: f"{self}\n")(), encoding="utf-8")

    def picture(self) -> str:
        """An SVG picture of the memory over the step and of the longest kernels."""
        return picture(self)

    def _json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values, for `json.dumps`."""
        return {
            "name": self.name,
            "device": self.device,
            "how": self.how,
            "milliseconds": None if self.seconds is None else self.seconds * 1e3,
            "flops": self.flops,
            "memory": {
                "at_peak": self.timeline.at_peak(),
                "xla": dict(self.memory),
                "on_host": dict(self.on_host),
                "allocator_peak": self.peak_bytes,
            },
            "arguments": [dataclasses.asdict(leaf) for leaf in self.leaves],
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "traffic": [dataclasses.asdict(entry) for entry in self.traffic],
            "waits": dict(self.waits),
            "idle": self.idle,
            "compiled": [dataclasses.asdict(function) for function in self.compiled],
            "remedies": [dataclasses.asdict(remedy) for remedy in self.remedies],
        }
