"""Cases of tests: which are slow, and tensors of other libraries."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest


class ForeignTensor:
    """A tensor of another library: numpy can read its values, and nobody else knows its dtype."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.shape, self.dtype = self.values.shape, f"torch.{self.values.dtype}"

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.values, dtype)


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those that are not among the quick ones have the marker `slow`.

    A case of several arguments is a tuple, as `pytest.mark.parametrize` takes it.
    """
    cases = list(cases)
    missing = [case for case in quick if case not in cases]
    assert not missing, f"no cases of the test: {missing}"
    arguments = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*each, marks=() if case in quick else pytest.mark.slow)
        for case, each in zip(cases, arguments, strict=True)
    ]
