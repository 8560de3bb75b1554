"""The choices of a caller: how a program is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from dejax.rgnn.passes import known_passes

BACKENDS = ("auto", "pallas", "xla")
PRECISIONS = ("f32", "tf32", "bf16")


@dataclass(frozen=True, slots=True)
class Options:
    """How a program is compiled.

    Attributes:
      backend: `"pallas"` for GPU kernels (interpreted without a GPU, for tests), `"xla"` for plain XLA, `"auto"` for
        kernels on a GPU and XLA elsewhere.
      precision: of products of float32 matrices: `"f32"`, `"tf32"` (10-bit mantissa on the tensor cores) or `"bf16"`.
        None means f32 where `jax.default_matmul_precision` is "highest" or "float32"; elsewhere tf32 in kernels, and in
        XLA what JAX asks for. Sums are accumulated in float32. Relative to float64, the
        error of each column is at most 1e-6, 2e-3 and 2e-2 where nothing cancels (docs/precision.md).
      disable: passes to leave out, from `dejax.rgnn.passes.PASSES`.
      interpret: whether kernels are interpreted; None: where the default backend is not a GPU.

    Raises:
      ValueError: an unknown backend, precision or pass.
    """

    backend: str = "auto"
    precision: str | None = None
    disable: tuple[str, ...] = ()
    interpret: bool | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.precision not in (None, *PRECISIONS):
            raise ValueError(f"precision must be None or one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        object.__setattr__(self, "disable", known_passes(self.disable))

    def with_default_precision(self) -> Options:
        """These options; where they have no precision, with that of `jax.default_matmul_precision` in this thread."""
        if self.precision is None and jax.config.values["jax_default_matmul_precision"] in ("highest", "float32"):
            return replace(self, precision="f32")
        return self
