"""A plugin of pytest: JAX as it will be without its lowering of kernels to Triton, which it has deprecated."""

import os
import sys

# jax 0.12 itself still imports the lowering before it asks for another, so what only its users import is taken away.
for _name in ("jax.experimental.pallas.triton", "jax._src.pallas.triton.primitives"):
    sys.modules[_name] = None  # type: ignore[assignment]
os.environ["DEJAX_LOWERING"] = "dejax"
