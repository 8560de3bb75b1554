"""Fixtures of the compiler's tests."""

from collections.abc import Iterator

import pytest

from tests.rgnn.preserved import by_numpy


@pytest.fixture
def programs_by_numpy() -> Iterator[None]:
    """Programs outside of `jit` run by numpy: for tests of what surrounds them."""
    with by_numpy(exact=()):
        yield
