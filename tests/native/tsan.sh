#!/bin/sh
# The offload store under ThreadSanitizer: a program of many threads (tests/offload/native/hammer.cc), compiled with the store's
# sources, on the CPU and on the driver of tests/offload/native/fake_cuda.cc. SECONDS_EACH: of each of its twelve parts.
# SANITIZE: others of the compiler's sanitizers, such as address,undefined; empty for none.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build/tsan}
sanitize=${SANITIZE-thread}
flags="-I$root/native -std=c++17 -O1 -g -Wall -pthread ${sanitize:+-fsanitize=$sanitize}"
mkdir -p "$build/files"
rm -f "$build"/*.o
cd "$root/native"
for source in activations/[!bh]*.cc activations/entries/*.cc blocks/*.cc driver/cuda_calls.cc driver/cuda_driver.cc driver/thread_pool.cc
do  # all but bindings and handlers
  ${CXX:-g++} $flags -c "$source" -o "$build/$(basename "$source" .cc).o"
done
${CXX:-g++} $flags "$root/tests/offload/native/hammer.cc" "$build"/*.o -ldl -o "$build/hammer"
${CXX:-g++} $flags -shared -fPIC "$root/tests/offload/native/fake_cuda.cc" -o "$build/libcuda.so.1"
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
export ASAN_OPTIONS=detect_leaks=0  # the driver made for tests keeps its streams and events
export LD_LIBRARY_PATH="$build"
"$build/hammer" "${SECONDS_EACH:-2}" "$build/files" cpu
"$build/hammer" "${SECONDS_EACH:-2}" "$build/files" cuda
echo "no race, no wrong tensor"  # nor what else was looked for
