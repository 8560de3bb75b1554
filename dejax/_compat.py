"""What differs between the supported versions of jax (>= 0.10.2, < 0.13), in one place."""

import jax

JAX_VERSION: tuple[int, ...] = jax.__version_info__
"""jax's version as integers, for comparisons such as `JAX_VERSION >= (0, 11)`."""

SUPPORTED_JAX = ((0, 10, 2), (0, 13))
"""The first supported version of jax, and the first one beyond the supported range."""


def unsupported_jax() -> str | None:
    """Why the installed jax is outside the supported range; None where it is inside."""
    first, beyond = SUPPORTED_JAX
    if first <= JAX_VERSION < beyond:
        return None
    wanted = f">={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}"
    return f"jax {jax.__version__} is installed, dejax supports {wanted}: pip install 'jax{wanted}'"
