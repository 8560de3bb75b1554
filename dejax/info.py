"""What this machine and this installation have: `python -m dejax.info`, or `--json`.

Prints versions, devices and their memory kinds, the CUDA driver, the native extension, the tuned tables, and what is
unavailable, why, and what to do about it. A part that is missing raises nothing: it is in that last list.
"""

import argparse
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from dejax._files import cache_folder
from dejax._optional import hidden_installation
from dejax._origin import version_of, versions

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "jraph", "tensorstore", "numpy", "rdflib")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_JAX_RANGE = ">=0.10.2,<0.13"  # that of pyproject.toml
# Called with what is unavailable, why, and the remedy.
Missing = Callable[[str, str, str], None]


def collect() -> dict[str, Any]:
    """Collects what this machine and this installation have, as plain values for `json.dumps`.

    Returns:
        "versions": versions by name, None for a missing package;
        "machine": system, architecture, and number of cores that this process may use;
        "default_backend" and "devices": what jax uses, and the memory kinds of each device;
        "driver": the CUDA driver and its devices, or None;
        "native": the state of dejax's native extension;
        "kernels": how Pallas kernels run here;
        "tuned_tables": a list of {file, entries}, the schedules that `Program.tune` has stored on this machine;
        "unavailable": a list of {what, why, remedy}, the features that do not work here.

    >>> from dejax import info
    >>> info.collect()["machine"].keys()
    dict_keys(['system', 'architecture', 'cores'])
    """
    unavailable: list[dict[str, str]] = []

    def missing(what: str, why: str, remedy: str) -> None:
        unavailable.append({"what": what, "why": why, "remedy": remedy})

    versions = _versions(missing)
    native = _native(missing)
    driver = _driver(missing) if native["loaded"] else None
    backend, devices = _devices(missing)
    has_gpu = any(device["platform"] == "gpu" for device in devices)
    if driver and driver["devices"] and not has_gpu:
        extra = "cuda13" if tuple(driver["version"]) >= (13, 0) else "cuda12"
        why = f"the driver has {len(driver['devices'])} device(s), but jax sees none"
        forced = os.environ.get("JAX_PLATFORMS", "")
        if forced and not {"cuda", "gpu"} & set(forced.split(",")):
            missing("GPU in jax", f"{why}: JAX_PLATFORMS={forced}", "unset JAX_PLATFORMS")
        else:
            missing("GPU in jax", why, f"pip install 'jax[{extra}]{_JAX_RANGE}'")
    if not has_gpu:
        missing(
            "compiled Pallas kernels",
            "jax sees no GPU",
            'none needed for backend="auto" or "xla"; backend="pallas" runs the kernels interpreted, for tests',
        )
    return {
        "versions": versions,
        "machine": {"system": platform.platform(), "architecture": platform.machine(), "cores": _cores()},
        "default_backend": backend,
        "devices": devices,
        "driver": driver,
        "native": native,
        "kernels": "compiled" if has_gpu else "interpreted",
        "tuned_tables": _tuned_tables(missing),
        "unavailable": unavailable,
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions(missing: Missing) -> dict[str, str | None]:
    # Of packages that are not loaded, from their metadata: importing flax only for its version would take a second.
    found = versions("dejax", *PACKAGES)
    for package in PACKAGES:
        if found[package] is None:
            missing(package, "it is not installed", f"pip install {package}")
    return found | {package: version for package in _PLUGINS if (version := version_of(package)) is not None}


def _native(missing: Missing) -> dict[str, Any]:
    try:
        from dejax import _native as native

        module = native.extension("dejax.info")
    except ImportError as error:
        reason = str(error)
        hidden = hidden_installation()
        remedy = "run Python in another folder" if hidden else "pip install . in the source tree, with a C++17 compiler"
        missing("native extension", reason, remedy)
        missing("CUDA driver", "the native extension would ask for it", "the same")
        return {"loaded": False, "reason": reason, "hidden": None if hidden is None else str(hidden)}
    return {
        "loaded": True,
        "file": str(module.__file__),
        "ffi_version": list(module.ffi_api_version),
        "threads": module.num_threads(),
        "handlers": [f"{name} ({platform_name})" for name, platform_name, _ in module.handlers()],
    }


def _driver(missing: Missing) -> dict[str, Any] | None:
    import dataclasses

    from dejax import _native as native

    driver, why = native.cuda_driver()
    if driver is None:
        missing(
            "CUDA driver",
            str(why).removeprefix("no CUDA driver: "),
            "install NVIDIA's driver, if this machine has an NVIDIA GPU",
        )
        return None
    return json.loads(json.dumps(dataclasses.asdict(driver)))  # tuples become lists, as they are with --json


def _devices(missing: Missing) -> tuple[str | None, list[dict[str, Any]]]:
    """jax's default backend and devices; (None, []) where jax has none."""
    try:
        import jax

        from dejax._compat import unsupported_jax

        devices = jax.devices()
        backend = jax.default_backend()
    except (ImportError, RuntimeError) as error:
        missing("jax devices", f"{type(error).__name__}: {error}", f"pip install 'jax{_JAX_RANGE}'")
        return None, []
    if (why := unsupported_jax()) is not None:
        missing("support of the installed jax", why, "install a version of the range")
    found = []
    for device in devices:
        stats = device.memory_stats() or {}
        found.append(
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_kinds": sorted(memory.kind for memory in device.addressable_memories()),
                "default_memory_kind": device.default_memory().kind,
                "bytes_limit": stats.get("bytes_limit"),
                "process": device.process_index,
            }
        )
    return backend, found


def _tuned_tables(missing: Missing) -> list[dict[str, Any]]:
    tables = []
    for path in sorted(cache_folder().glob("schedules_*.json")):
        try:
            kernels = json.loads(path.read_text(encoding="utf-8"))
            tables.append({"file": path.name, "entries": sum(map(len, kernels.values()))})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            missing(f"tuned table {path.name}", f"it cannot be read: {error}", "delete it or tune again")
    return tables


def _by_name(handlers: Sequence[str]) -> list[str]:
    """`name (platform, platform)` from `name (platform)` of each."""
    platforms: dict[str, list[str]] = {}
    for handler in handlers:
        name, _, where = handler.partition(" ")
        platforms.setdefault(name.removeprefix("dejax_"), []).append(where.strip("()"))
    return [f"{name} ({' and '.join(where)})" for name, where in platforms.items()]


def render(report: dict[str, Any]) -> str:
    """Formats the result of `collect` as text.

    >>> from dejax import info
    >>> print(info.render(info.collect()).splitlines()[2])
    Versions
    """
    lines = ["dejax " + report["versions"]["dejax"], "", "Versions"]
    width = max(map(len, report["versions"]))
    for name, version in report["versions"].items():
        if name != "dejax":
            lines.append(f"  {name:{width}}  {version or 'not installed'}")
    machine = report["machine"]
    lines += ["", "Machine", f"  {machine['system']}, {machine['architecture']}, {machine['cores']} cores"]

    lines += ["", f"Devices (default backend: {report['default_backend'] or 'none'})"]
    for device in report["devices"]:
        kinds = ", ".join(
            kind + (" (default)" if kind == device["default_memory_kind"] else "") for kind in device["memory_kinds"]
        )
        limit = f", {device['bytes_limit'] / 2**30:.1f} GiB for jax" if device["bytes_limit"] else ""
        lines.append(f"  {device['platform']}:{device['id']}  {device['kind']}{limit}; memory kinds: {kinds}")
    if not report["devices"]:
        lines.append("  none")
    lines.append(f"  Pallas kernels run {report['kernels']}")

    lines += ["", "CUDA driver"]
    driver = report["driver"]
    if driver is None:
        lines.append("  none")
    else:
        lines.append(f"  supports CUDA {driver['version'][0]}.{driver['version'][1]}")
        for device in driver["devices"]:
            major, minor = device["compute_capability"]
            maps = "can" if device["can_map_host_memory"] else "cannot"
            lines.append(
                f"  {device['name']}: compute capability {major}.{minor}, {device['total_memory'] / 2**30:.1f} GiB, "
                f"{device['multiprocessors']} SMs, {device['l2_cache'] / 2**20:.0f} MiB L2, {maps} map host memory"
            )

    lines += ["", "Native extension"]
    native = report["native"]
    if native["loaded"]:
        version = ".".join(map(str, native["ffi_version"]))
        lines += [f"  {native['file']}", f"  XLA FFI {version}, {native['threads']} threads; handlers:"]
        lines += textwrap.wrap(
            ", ".join(_by_name(native["handlers"])), 100, initial_indent="    ", subsequent_indent="    "
        )
    else:
        lines.append("  not loaded")

    lines += ["", "Tuned tables"]
    lines += [f"  {table['file']}: {table['entries']} entries" for table in report["tuned_tables"]] or ["  none"]

    lines += ["", "Unavailable"]
    for entry in report["unavailable"]:
        lines += [f"  {entry['what']}: {entry['why']}", f"      {entry['remedy']}"]
    if not report["unavailable"]:
        lines.append("  nothing")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `python -m dejax.info`, which prints the result of `collect`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dejax.info", description="What this machine and installation have."
    )
    parser.add_argument("--json", action="store_true", help="print JSON rather than text")
    options = parser.parse_args(arguments)
    report = collect()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
