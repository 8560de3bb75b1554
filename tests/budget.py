"""How much a test does in `make test` and in `make test-all`."""

from hypothesis import settings


def examples(count: int) -> int:
    """The number of hypothesis examples: `count`, or a quarter of it under the profile `quick` of `make test`."""
    return max(1, count * settings.default.max_examples // 100)
