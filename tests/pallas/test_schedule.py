"""Schedules: powers of two within what a kernel can do, and tuned tables that overrule the heuristics."""

import json

import pytest

from dejax.pallas import schedule
from dejax.pallas._shapes import next_power_of_two


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("degree", [0.0, 0.4, 1.0, 3.0, 51.0, 1e6])
def test_traversal_schedules_are_powers_of_two_and_fit(degree, interpret):
    for width in (1, 2, 8, 64, 128, 512, 1024, 4096):
        s = schedule.traversal_schedule(width, degree, interpret=interpret)
        for n in (s.rows_per_program, s.items_per_step, s.num_warps):
            assert n >= 1 and next_power_of_two(n) == n
        if not interpret:  # at most 64 elements of a tile a thread
            assert s.rows_per_program * s.items_per_step * width <= 64 * 32 * s.num_warps


@pytest.mark.parametrize("precision", ["f32", "tf32", "bf16"])
def test_product_schedules_are_powers_of_two_of_at_least_16(precision):
    for k in (1, 17, 64, 100, 128, 1000):
        for n in (1, 64, 128, 300):
            g = schedule.gemm_schedule(k, n, 64, precision)
            o = schedule.outer_schedule(k, n, precision)
            for side in (g.block_k, g.block_n, o.block_rows, o.block_k, o.block_n):
                assert side >= 16 and next_power_of_two(side) == side
            assert schedule.gemm_schedule(k, n, 64, precision, whole_n=True).block_n >= n


@pytest.mark.parametrize("groups, k, n, precision, expected",
                         [(8, 8, 8, "tf32", 8), (8, 16, 16, "tf32", 4), (6, 20, 3, "bf16", 3), (4, 64, 64, "tf32", 1),
                          (8, 8, 8, "f32", 1), (1, 8, 8, "tf32", 1)])  # fmt: skip
def test_merged_groups(groups, k, n, precision, expected):
    assert schedule.merged_groups(groups, k, n, precision, "float32") == expected


def test_a_tuned_table_is_read(tmp_path, monkeypatch):
    (tmp_path / "gemm.json").write_text(json.dumps({"some key": {"block_k": 32}}))
    monkeypatch.setattr(schedule, "TUNED", tmp_path)
    schedule._table.cache_clear()
    try:
        assert schedule.lookup("gemm", "some key") == {"block_k": 32}
        assert schedule.lookup("gemm", "other key") is None
        assert schedule.lookup("outer", "some key") is None
    finally:
        schedule._table.cache_clear()
