"""Plans of where features lie."""

import numpy as np
import pytest

from dejax.minibatch import PlacementPlan, ReadRates, TypePlacement, plan_placement
from tests.host_gather.rows import file_of

RATES = ReadRates(device=2e12, host=5e10, drive=2e9)
VISITS = {"paper": np.array([9.0, 5, 1, 0, 3, 0.5]), "author": np.array([2.0, 0.1])}
ROW_BYTES = {"paper": 512, "author": 1024}


def test_types_go_to_the_device_then_to_host_memory_then_to_the_drive() -> None:
    everything = plan_placement(VISITS, ROW_BYTES, device_bytes=1 << 20, host_bytes=1 << 20, rates=RATES)
    assert isinstance(everything, PlacementPlan) and isinstance(everything.types["author"], TypePlacement)
    assert everything.types["author"].place == "device" and len(everything.types["author"].on_device) == 2
    none = plan_placement(VISITS, ROW_BYTES, device_bytes=0, host_bytes=1 << 20, rates=RATES)
    assert {each.place for each in none.types.values()} == {"host"}
    reads = 1 - np.exp(-VISITS["paper"])
    assert none.types["paper"].read_bytes["host"] == pytest.approx(512 * reads.sum())
    assert none.milliseconds["drive"] == 0
    # Room on the device for one row, in host memory for the index and three rows of papers, which are those of a batch.
    alone = {"paper": VISITS["paper"]}
    little = plan_placement(alone, ROW_BYTES, device_bytes=24 + 512, host_bytes=24 + 1536, rates=RATES)
    paper = little.types["paper"]
    assert paper.on_device.tolist() == [0] and paper.cache_bytes == 1536 and paper.place == "drive"
    assert paper.read_bytes["drive"] == pytest.approx(4096 * reads[[3, 5]].sum())
    assert little.milliseconds["drive"] == pytest.approx(1e3 * paper.read_bytes["drive"] / RATES.drive)
    assert little.step_milliseconds == pytest.approx(little.milliseconds["drive"])
    assert "| paper | 6 | 3 KiB | 1 rows | drive | 1.5 KiB |" in str(little)
    # One type lies in host memory whole, where its other rows fit.
    mixed = plan_placement(VISITS, ROW_BYTES, device_bytes=0, host_bytes=32 + 2048 + 2560, rates=RATES)
    assert {name: each.place for name, each in mixed.types.items()} == {"paper": "drive", "author": "host"}
    with pytest.raises(ValueError, match="`host_bytes` must be more than 32"):
        plan_placement(VISITS, ROW_BYTES, device_bytes=0, host_bytes=30, rates=RATES)
    with pytest.raises(
        ValueError, match=r"`host_bytes` must be at least \d+, for caches that hold the rows of a batch"
    ):
        plan_placement(VISITS, ROW_BYTES, device_bytes=0, host_bytes=100, rates=RATES)


def test_rates_are_measured() -> None:
    path = file_of(np.zeros((1 << 12, 2050), np.uint8))
    rates = ReadRates.measured(path, seconds=0.01)
    assert min(rates.device, rates.host, rates.drive) > 1e6
    with pytest.raises(ValueError, match="at least 8388608 bytes"):
        ReadRates.measured(file_of(np.zeros(5)))
