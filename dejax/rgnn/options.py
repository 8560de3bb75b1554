"""The choices of a caller: how a program is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from dejax.pallas.lowering.choice import checked
from dejax.rgnn.passes import known_passes

BACKENDS = ("auto", "pallas", "xla")
PRECISIONS = ("f32", "tf32", "bf16")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the compiler for relational programs and layers.

    Attributes:
      backend: `"pallas"` for GPU kernels (interpreted without a GPU, for tests), `"xla"` for plain XLA, `"auto"` for
        kernels on a GPU and XLA elsewhere.
      precision: precision of products of float32 matrices: `"f32"`, `"tf32"` (10-bit mantissa on the tensor cores) or
        `"bf16"`. None means f32 if `jax.default_matmul_precision` is "highest" or "float32", otherwise tf32 in kernels
        and JAX's default in XLA. Sums are accumulated in float32. Relative to float64, the error of each column is at
        most 1e-6 (f32), 2e-3 (tf32) or 2e-2 (bf16) where nothing cancels (docs/precision.md).
      disable: names of compiler passes to leave out, from `dejax.rgnn.passes.PASSES`.
      interpret: whether kernels are interpreted; None: if the default backend is not a GPU.
      lowering: how kernels become GPU programs. `"pallas"` is JAX's own lowering to Triton, which JAX has deprecated.
        `"dejax"` is the lowering of dejax, which needs the package triton (`pip install 'dejax-ml[triton]'`). None
        takes the value of the environment variable `DEJAX_LOWERING`; without the variable it takes `"pallas"` as long
        as JAX has that lowering. docs/performance/lowering.md compares the two.

    Raises:
      ValueError: the backend, the precision, a pass or the lowering is unknown.
    """

    backend: str = "auto"
    precision: str | None = None
    disable: tuple[str, ...] = ()
    interpret: bool | None = None
    lowering: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.precision not in (None, *PRECISIONS):
            raise ValueError(f"precision must be None or one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        checked(self.lowering, "lowering")
        object.__setattr__(self, "disable", known_passes(self.disable))

    def with_default_precision(self) -> Options:
        """The options, with the precision of `jax.default_matmul_precision` if they have none of their own."""
        if self.precision is None and jax.config.values["jax_default_matmul_precision"] in ("highest", "float32"):
            return replace(self, precision="f32")
        return self
