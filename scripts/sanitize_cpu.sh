#!/bin/sh
# The CPU kernels' tests under the address and undefined-behaviour sanitizers: a build of its own beside the
# installed package, loaded in its place, with the instruction sets that this machine runs. `make test-sanitize` calls it with
# the interpreter to use and the folder to build in.
set -eu
python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
build=${2:-$root/build/sanitize}

"$python" -m pip install --quiet nanobind ninja
cmake=$(command -v cmake || true)
[ -n "$cmake" ] || { "$python" -m pip install --quiet cmake; cmake="$python -m cmake"; }
$cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DINTFLASH_SANITIZE=ON -DINTFLASH_INSTRUCTION_SETS=native \
    -DPython_EXECUTABLE="$(command -v "$python")" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >/dev/null
$cmake --build "$build" --parallel "$(nproc)"

# Python itself is not instrumented: the runtime comes first, its own leaks are not ours.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
INTFLASH_TEST_NATIVE="$build" PYTHONPATH="$root/src:$root/tests" \
    "$python" -m pytest -n "$(nproc)" -p backends.sanitized_native "$root/tests/backends/test_cpu.py" \
    "$root/tests/backends/test_cpu_inputs.py" "$root/tests/backends/test_cpu_calls.py" -k "not forked and not short_of"
