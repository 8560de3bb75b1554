"""The CUDA side of the store, on a driver that runs queued work as late and in as unlucky an order as allowed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build(tmp_path_factory.mktemp("driver"))


def build(folder, *options):
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler to build the driver with")
    source = Path(__file__).with_name("fake_cuda.cc")
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(folder / "libcuda.so.1"),
        *options,
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("disk", [pytest.param(False, marks=pytest.mark.slow), True])
def test_random_programs(driver, disk, tmp_path):
    run("ring_program.py", driver, 1, *([str(tmp_path)] if disk else []))


def test_pieces_of_an_optimizers_state(driver):
    run("pieces_program.py", driver, 1)


@pytest.mark.slow
def test_rows_of_a_stacks_state(driver):
    run("rows_program.py", driver, 1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["new", *(pytest.param(how, marks=pytest.mark.slow) for how in ("old", "refused"))])
def test_pieces_of_a_call_share_staging_memory(driver, batch, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_BATCH", batch)
    run("staging_program.py", build(tmp_path, "-DOLD_BATCH") if batch == "old" else driver, 1)


def test_state_in_files(driver, tmp_path):
    run("files_program.py", driver, 1, str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("disk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_mutex_is_free_while_the_device_is_waited_for(driver, disk, tmp_path):
    run("waits_program.py", driver, 1, *([str(tmp_path)] if disk else []))


def run(program, driver, seed, *arguments):
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver),
        "JAX_PLATFORMS": "cpu",
        "FAKE_CUDA_SEED": str(seed),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
    }
    command = [sys.executable, str(Path(__file__).with_name(program)), str(seed), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "right" in ran.stdout
