#!/usr/bin/env bash
# Everything there is to measure on this GPU, and the page of it: report.html and results.tar.gz in $OUT (few files
# travel). Arguments are `python -m benchmarks all`'s. A copy without .git takes its commit from GIT_COMMIT.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-results/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src:$PWD" PYTHONUNBUFFERED=1 COLUMNS=200
results=results/report # as the page names its files
"${PYTHON:-python3}" -m benchmarks all --device cuda --out "$results" "$@"
status=$?
cp "$results/report.html" "$OUT/"
tar -C "$results" -czf "$OUT/results.tar.gz" .
exit $status
