#!/usr/bin/env bash
# The whole GPU test set, then the measurement, on the machine with the GPU: results under $OUT (default results/gpu).
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD/scripts" PYTHONUNBUFFERED=1
OUT="${OUT:-results/gpu}"
mkdir -p "$OUT"
python3 -m pytest tests/backends/triton tests/backends/cuda -m gpu -n "${WORKERS:-14}" -q -p no:cacheprovider 2>&1 | tee "$OUT/tests.log" | tail -n "${TAIL:-40}"
status=$?
if [ "${1:-}" != "tests" ]; then
    python3 -m intflash.bench.gpu_attention --out "$OUT" --jobs "${WORKERS:-14}" 2>&1 | tee "$OUT/bench.log" | tail -n 150 || status=1
fi
exit $status
