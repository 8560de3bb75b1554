"""Compiles a layer's kernels for an H200 without a GPU, and prints registers, spills and instructions.

    python -m benchmarks rgnn_compiled --graph am --model hgt --kernels backward_._traverse

It runs `ptxas` of jax's CUDA plugin (`pip install '.[cuda13]'`), and for instructions `nvdisasm`
(`pip install nvidia-cuda-nvdisasm`). For each kernel it prints registers per thread, spilled bytes, the number of
instructions, the number that store to shared memory (a traversal should have none), and the kinds of instructions of
each innermost loop. Schedules are the heuristic's: tuned ones are read only if there is a device.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from benchmarks.provenance import Save

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 }
device_description_str: "NVIDIA H200"
"""
# A ptxas that keeps its input, its output and its messages.
_PTXAS = """#!/bin/sh
case "$1" in --version | -V) exec {ptxas} "$@" ;; esac
kept=$(mktemp -u {folder}/XXXXXXXX)
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && made=$argument
  previous=$argument
done
{ptxas} "$@" -v >$kept.log 2>&1
status=$?
cat $kept.log >&2
[ -n "$made" ] && cp "$made" $kept.cubin 2>/dev/null
exit $status
"""
_SHOWN = 12  # how many of a loop's most frequent kinds of instructions to print


def cuda_folder() -> Path | None:
    """The folder `bin` of the CUDA compiler in jax's plugin."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for location in found.submodule_search_locations or () if found else ():
            if (Path(location) / "bin" / "ptxas").exists():
                return Path(location) / "bin"
    return None


def prepare(folder: Path, tools: Path) -> None:
    """Makes a CUDA folder in `folder` whose `ptxas` keeps its output. Call it before jax is imported."""
    (folder / "bin").mkdir()
    for tool in tools.iterdir():
        if tool.name != "ptxas":
            (folder / "bin" / tool.name).symlink_to(tool)
    (folder / "nvvm").symlink_to(tools.parent / "nvvm")
    wrapper = folder / "bin" / "ptxas"
    wrapper.write_text(_PTXAS.replace("{ptxas}", str(tools / "ptxas")).replace("{folder}", str(folder)))
    wrapper.chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    os.environ["JAX_PLATFORMS"] = ""
    os.environ["XLA_FLAGS"] = (
        "--xla_gpu_enable_libnvjitlink=false --xla_gpu_enable_libnvptxcompiler=false "
        f"--xla_gpu_cuda_data_dir={folder} --xla_gpu_autotune_level=0"
    )


def compile_layer(args: argparse.Namespace, folder: Path) -> int:
    """Compiles the layer and returns the bytes of its temporaries."""
    import jax
    import jax._src.lib
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from benchmarks.described import layer
    from benchmarks.peers.case import Settings
    from tests.described import H200

    jax._src.lib.cuda_path = str(folder)
    jax.config.update("jax_platforms", "cpu")
    found = layer(
        args.graph, args.model, Settings(args.width, args.heads, args.dtype, args.precision), tuple(args.disable)
    )
    # jax loads its plugins when it makes its first array.
    topology = topologies.get_topology_desc("", platform="cuda", target_config=_H200, topology="1x1x1")
    there = SingleDeviceSharding(topology.devices[0])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), found.args)
    with jax.sharding.use_abstract_mesh(H200), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function = found.forward if args.phase == "forward" else found.training
        compiled = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def registers(folder: Path) -> dict[str, tuple[int, int, Path]]:
    """Registers, spilled bytes and file of instructions of each compiled kernel."""
    found = {}
    for log in folder.glob("*.log"):
        name, spilled = "", 0
        for line in log.read_text(encoding="utf-8").splitlines():
            if match := re.search(r"Compiling entry function '(\w+)'", line):
                name = match[1]
            elif match := re.search(r"(\d+) bytes spill stores", line):
                spilled = int(match[1])
            elif (match := re.search(r"Used (\d+) registers", line)) and name:
                found[name] = int(match[1]), spilled, log.with_suffix(".cubin")
    return found


def instructions(text: str) -> tuple[int, list[Counter[str]]]:
    """Number of instructions of a disassembled kernel, and those of each innermost loop by kind."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"\s*\.(L_x_\d+):", line):
            labels[match[1]] = len(lines)
        elif match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*);", line):
            lines.append(match[1])
    loops = []
    for end, line in enumerate(lines):
        match = re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)
        if match and labels.get(match[1], len(lines)) <= end:
            loops.append((labels[match[1]], end))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    kind = lambda line: re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0]  # noqa: E731
    # Every kernel ends in a branch to itself.
    return len(lines), [Counter(map(kind, lines[a : b + 1])) for a, b in inner if b > a]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", default="aifb", help="graph whose counts to use")
    parser.add_argument("--model", default="rgcn", choices=("rgcn", "rgat", "hgt"), help="layer to compile")
    parser.add_argument(
        "--phase", default="training", choices=("forward", "training"), help="forward alone, or forward and backward"
    )
    parser.add_argument("--width", type=int, default=64, help="features of a node, before and after the layer")
    parser.add_argument("--heads", type=int, default=1, help="heads of attention")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of features and parameters"
    )
    parser.add_argument("--precision", default="tf32", choices=("f32", "tf32", "bf16"), help="precision of products")
    parser.add_argument("--disable", nargs="*", default=[], help="passes to disable")
    parser.add_argument("--kernels", default="typed|traverse|map_entries", help="a regular expression for kernel names")


def run(args: argparse.Namespace, save: Save) -> None:
    del save  # it prints
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = cuda_folder()
        if tools is None:
            raise SystemExit("no ptxas: pip install '.[cuda13]' in the source tree")
        disassembler = shutil.which("nvdisasm") or shutil.which("nvdisasm", path=tools)
        prepare(folder, tools)
        temporaries = compile_layer(args, folder)
        print(f"{args.graph} {args.model} {args.phase}: {temporaries / 2**20:.0f} MiB of temporaries")
        for kernel, (count, spilled, cubin) in sorted(registers(folder).items()):
            if not re.search(args.kernels, kernel):
                continue
            line = f"{kernel}: {count} registers, {spilled} bytes spilled"
            loops: list[Counter[str]] = []
            if disassembler is not None:
                done = subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=False)
                total, loops = instructions(done.stdout)
                stores = len(re.findall(r"\bSTS", done.stdout))
                line += f", {total} instructions" + (f", {stores} stores to shared memory" if stores else "")
            print(line)
            for loop in loops:
                kinds = " ".join(f"{kind} {n}" for kind, n in loop.most_common(_SHOWN))
                print(f"    loop of {loop.total()}: {kinds}")
