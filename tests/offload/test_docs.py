"""The example of docs/offload.md runs as shown."""

import re
from pathlib import Path

import pytest

from dejax import _native

PAGE = (Path(__file__).parents[2] / "docs/offload.md").read_text(encoding="utf-8")


@pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
def test_the_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)
    exec(code, {})
    assert capsys.readouterr().out.startswith("offload: 8.39 MB stored in 1 runs")


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / link).exists(), link
