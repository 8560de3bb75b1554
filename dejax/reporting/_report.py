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
    """What a step costs; made by `dejax.report`.

    `print(report)` is the page as text. `save` writes it as HTML, SVG, JSON or text. `as_dict` gives its figures.

    Attributes:
        name: of the step.
        device: name of the device, and versions.
        backend: "gpu" or "cpu".
        how: how the figures of kernels were found.
        leaves: the arrays of the arguments.
        timeline: bytes on the device by owner, in the order of execution.
        memory: XLA's own figures, bytes by name.
        on_host: bytes of the arguments in host memory, by owner.
        kernels: by time.
        flops: of one call, counted by XLA; 0 where it does not tell.
        traffic: bytes over the bus and to the disk.
        waits: seconds of one call, by reason.
        idle: share of the time in which the device did nothing; None where it was not measured.
        seconds: wall time of one call; None where the step was not run.
        peak_bytes: the allocator's peak since the process began; None where the device does not tell.
        remedies: what to try, at most three.

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
        """Writes the page: HTML in one file if the name ends in `.html`, the picture for `.svg`, otherwise text.

        Raises:
            OSError: the file cannot be written.
        """
        suffix = Path(path).suffix.lower()
        forms = {".html": lambda: _html.render(self), ".svg": self.picture, ".json": lambda: self._json()}
        Path(path).write_text(forms.get(suffix, lambda: f"{self}\n")(), encoding="utf-8")

    def picture(self) -> str:
        """Memory over the step and the longest kernels, as SVG."""
        return picture(self)

    def _json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values that `json.dumps` takes."""
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
            "remedies": [dataclasses.asdict(remedy) for remedy in self.remedies],
        }
