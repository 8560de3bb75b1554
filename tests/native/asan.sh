#!/bin/sh
# Builds the extension with AddressSanitizer and UBSan, and runs the tests of the CPU handlers of dejax.host_gather and
# dejax.offload with it. PYTHON: an interpreter with dejax's test dependencies, nanobind and cmake; by default python3.
# `allocator_may_return_null`: one of the tests asks XLA for more memory than a machine has, and expects an error.
set -eu
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$root/build/asan
mkdir -p "$build"
cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$python" \
  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-omit-frame-pointer"
cmake --build "$build"
rm -rf "$build/run"
mkdir "$build/run"
cp -r "$root/dejax" "$root/tests" "$root/benchmarks" "$root/pyproject.toml" "$build/run/"
rm -f "$build"/run/dejax/_dejax_native*.so
cp "$build"/_dejax_native*.so "$build/run/dejax/"
cd "$build/run"
LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 JAX_PLATFORMS=cpu PYTHONPATH="$build/run" \
  "$python" -m pytest -q -p no:cacheprovider -m "not slow" tests/host_gather tests/offload/test_store.py \
  tests/offload/test_optimizer.py -k "not forked and not full_disk and not next_run"
