#!/bin/sh
# The CPU kernels' tests under the address, undefined-behaviour and thread sanitizers: a build of its own beside the
# installed package, loaded in its place. Called with the interpreter to use, the folder to build in, and `smoke` for a
# few minutes' part: the best instruction set of this machine and the generic one, inputs and calls. Otherwise all sets
# that this machine runs, and all tests of the kernels.
set -eu
python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
build=${2:-$root/build/sanitize}

tests="$root/tests/backends/test_cpu_inputs.py $root/tests/backends/test_cpu_calls.py $root/tests/integer/test_integer_cpu.py"
sets=native
if [ "${3:-}" = smoke ]; then
    sets=$("$python" -c "from intflash.backends import cpu; print(cpu.instruction_sets()[0])")
else
    tests="$tests $root/tests/backends/test_cpu.py"
fi

"$python" -m pip install --quiet nanobind ninja
cmake=$(command -v cmake || true)
[ -n "$cmake" ] || { "$python" -m pip install --quiet cmake; cmake="$python -m cmake"; }
$cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DINTFLASH_SANITIZE=ON "-DINTFLASH_INSTRUCTION_SETS=$sets" \
    -DPython_EXECUTABLE="$(command -v "$python")" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >/dev/null
$cmake --build "$build" --parallel "$(nproc)"

# Python itself is not instrumented: the runtime comes first, its own leaks are not ours.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
INTFLASH_TEST_NATIVE="$build" PYTHONPATH="$root/src:$root/tests" \
    "$python" -m pytest -n "$(nproc)" -p backends.sanitized_native $tests -k "not forked and not short_of"

# The thread sanitizer cannot see into Python, so that a program of its own runs integer models from several threads.
g++ -std=c++17 -O1 -g1 -ffp-contract=off -pthread -fsanitize=thread "-I$root/csrc" \
    "$root"/csrc/cpu/dispatch.cpp "$root"/csrc/cpu/program.cpp "$root"/csrc/cpu/thread_pool.cpp \
    "$root"/csrc/cpu/isa/generic.cpp "$root/tests/machines/cpu/program_threads.cpp" -o "$build/program_threads"
"$build/program_threads"
