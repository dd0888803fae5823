#!/usr/bin/env bash
# The CPU kernels built and timed on a machine where nothing can be installed: needs a compiler, CMake and a copy of
# nanobind's package (NANOBIND, carried along). Arguments are `intflash bench attention --device cpu`'s; results in $OUT.
set -eu
cd "$(dirname "$0")/.."
OUT=${OUT:-results/cpu}
NANOBIND=${NANOBIND:-results/nanobind}
build=results/build-cpu
mkdir -p "$OUT"
cmake -S . -B "$build" -Dnanobind_DIR="$PWD/$NANOBIND/cmake" -DPython_EXECUTABLE="$(command -v python3)" > "$OUT/build.log"
cmake --build "$build" --parallel >> "$OUT/build.log" 2>&1
cp "$build"/_native*.so src/intflash/
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1
python3 -m intflash.cli bench attention --device cpu --out "$OUT" "$@"
