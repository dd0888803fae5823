#!/usr/bin/env bash
# On the machine with the GPU: every GPU test, five minutes of random problems (intflash selfcheck), and the measurement.
# Results under $OUT (default results/gpu). `gpu_check.sh tests` leaves the measurement out; SECONDS_OF_SELFCHECK=0 the
# random problems.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD" PYTHONUNBUFFERED=1
# Without the native module there is no CUDA backend, and its tests would skip.
if ! python3 -c "from intflash import _native"; then
    cmake -S . -B build/native -G Ninja -Dnanobind_DIR="$(python3 -m nanobind --cmake_dir)" -DPython_EXECUTABLE="$(which python3)" &&
        cmake --build build/native && cp build/native/_native*.so src/intflash/ || exit 1
fi
OUT="${OUT:-results/gpu}"
mkdir -p "$OUT"
status=0
python3 -m pytest tests -m gpu -n "${WORKERS:-14}" -q -p no:cacheprovider 2>&1 | tee "$OUT/tests.log" | tail -n "${TAIL:-40}" || status=1
seconds="${SECONDS_OF_SELFCHECK:-300}"
if [ "$seconds" != 0 ]; then
    python3 -m intflash.cli selfcheck --seconds "$seconds" --out "$OUT/selfcheck" 2>&1 | tee "$OUT/selfcheck.log" | tail -n 60 || status=1
fi
if [ "${1:-}" != "tests" ]; then
    python3 -m intflash.bench.gpu_attention --out "$OUT" --jobs "${WORKERS:-14}" 2>&1 | tee "$OUT/bench.log" | tail -n 150 || status=1
fi
exit $status
