"""Many threads on one store: hammer.cc without a sanitizer, and under ThreadSanitizer (tests/native/tsan.sh)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "native" / "tsan.sh"


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_hammer(sanitize, tmp_path):
    """The program reports wrong tensors, the sanitizer races."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    environment = {**os.environ, "CXX": compiler, "BUILD": str(tmp_path), "SANITIZE": sanitize, "SECONDS_EACH": "0.5"}
    ran = subprocess.run(["sh", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=400)
    if "cannot find -ltsan" in ran.stderr or "libtsan" in ran.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert ran.returncode == 0 and "no race, no wrong tensor" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-4000:]
