"""`benchmarks/mosaic_trial.py`: kernels run interpreted, lower for an H200; wrong results and faults show."""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import mosaic_trial as trial
import pytest
from jax.sharding import AbstractMesh

PRODUCTS = [(width, shape) for width, shapes in trial.PRODUCTS.items() for shape in shapes]
SUMS = [(width, shapes[0]) for width, shapes in trial.SUMS.items()]


def lower(function, *shapes) -> None:
    """Mosaic's lowering for an H200, without a GPU. It checks layouts, copies and the size of shared memory."""
    sharding = jax.sharding if hasattr(jax.sharding, "AbstractDevice") else importlib.import_module("jax._src.mesh")
    device = sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(("width", "shape"), PRODUCTS, ids=[f"{w}: {s.name}" for w, s in PRODUCTS])
def test_products_lower_for_an_h200(width, shape):
    x = jax.ShapeDtypeStruct((trial.ROWS, width), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((trial.TYPES, width, width), jnp.bfloat16)
    types = jax.ShapeDtypeStruct((trial.ROWS // shape.rows,), jnp.int32)
    lower(functools.partial(trial.mosaic_product, shape=shape), x, w, types)


@pytest.mark.parametrize(("width", "shape"), SUMS, ids=[f"{w}: {s.name}" for w, s in SUMS])
def test_sums_lower_for_an_h200(width, shape):
    x = jax.ShapeDtypeStruct((trial.SUMS_BYTES // 4 // width, width), jnp.float32)
    lower(functools.partial(trial.mosaic_sums, shape=shape), x)


def mosaic_only(case: trial.Case, *numbers: int) -> trial.Case:
    """The case with only some of its Mosaic kernels."""
    mosaic = [k for k in case.kernels if k.lowering == "mosaic"]
    return replace(case, kernels=tuple(mosaic[i] for i in numbers))


@pytest.mark.parametrize("number", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["plain", "specialized"])
def test_a_block_goes_through_tiles_of_several_types(monkeypatch, capfd, number):
    monkeypatch.setattr(trial, "SMS", 1)  # blocks of several tiles each
    case = mosaic_only(trial.product_case(64, 1280), number)
    types = case.tables[f"type of {trial.UNIT} rows"]
    assert len(set(types)) > 2 and len(types) == 5
    (row,) = (trial.run_job(job) for job in trial.prepare([case]))
    assert "failed" not in row and 0 < row["error"] < 0.01
    assert "RACE" not in capfd.readouterr().out  # reported by the interpreter from jax 0.11 on


def test_a_wrong_result_or_a_fault_spoils_only_its_own_line(monkeypatch):
    def fault(_):
        raise RuntimeError("no such layout\nand more")

    def nan(x):
        return trial.xla_sums(x) / 0

    case = trial.sums_case(256, trial.SUMS_UNIT)
    functions = {"wrong": lambda x: 1.01 * trial.xla_sums(x), "nan": nan, "fault": fault, "right": trial.xla_sums}
    made = tuple(trial.Kernel("xla", name, function, ("x",)) for name, function in functions.items())
    wrong, not_a_number, failed, right = (trial.run_job(job) for job in trial.prepare([replace(case, kernels=made)]))
    assert wrong["failed"].startswith("ValueError: wrong result: relative error 1.0")
    assert "wrong result" in not_a_number["failed"]
    assert failed["failed"] == "RuntimeError: no such layout" and "error" not in failed
    assert "failed" not in right
    monkeypatch.setattr(trial, "plgpu", None)
    monkeypatch.setattr(trial, "MOSAIC_ERROR", "ImportError: no mosaic_gpu")
    (job,) = trial.prepare([mosaic_only(trial.sums_case(256, trial.SUMS_UNIT), 0)])
    assert "no mosaic_gpu" in trial.run_job(job)["failed"]


def test_table_and_summary():
    case = trial.sums_case(256, trial.SUMS_UNIT)
    timed = [
        {"lowering": name, "kernel": "k", "error": 0.0, "device": {"span_ms": ms, "kernels_ms": ms, "launches": 1.0}}
        for name, ms in (("triton", 2.0), ("triton", 3.0), ("mosaic", 1.0), ("xla", 4.0))
    ]
    found = trial.summary(case, [*timed, {"lowering": "mosaic", "kernel": "k", "failed": "RuntimeError: x"}])
    assert found["best_ms"] == {"mosaic": 1.0, "triton": 2.0, "xla": 4.0} and found["mosaic_over_triton"] == 0.5
    text = trial.table({case.name: found})
    assert "Mosaic over best of Triton: 0.500" in text and "RuntimeError: x" in text
    assert case.bytes == trial.SUMS_UNIT * 9 / 8


def test_arguments_and_json(tmp_path, monkeypatch, capsys):
    for arguments in (["--widths", "65"], ["--rows", "100"], ["--bytes", "5"], ["--widths", "", "--sums", ""]):
        with pytest.raises(SystemExit):
            trial.main(arguments)
    monkeypatch.setattr(trial, "SMS", 1)  # blocks of several tiles each
    monkeypatch.setattr(trial, "sums_case", lambda *a, make=trial.sums_case: mosaic_only(make(*a), 0))
    size = str(trial.SUMS_UNIT)
    found = trial.main(["--widths", "", "--sums", "512", "--bytes", size, "--out", str(tmp_path / "new")])
    written = json.loads((tmp_path / "new" / "mosaic_trial_cpu.json").read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert written.pop("about")["versions"]["jax"] == jax.__version__
    assert written == found and "error 0.0e+00" in printed and "RACE" not in printed
    ((row,),) = (cell["kernels"] for cell in found["cells"].values())
    assert row == {"lowering": "mosaic", "kernel": trial.SUMS[512][0].name, "error": 0.0}
