#!/usr/bin/env bash
# Check the mixed families on this GPU, then measure every table and figure that needs one into $OUT
# (one archive, since few files travel). Arguments: the steps to run, by default all.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-results/gpu}
mkdir -p "$OUT"
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
results=$(mktemp -d)
experiments="mixed_kernels kernels_batch1 kernels_batch8 qflash_figure4 lite_conversion lite_sass qflash_figure6 qflash_table3 qflash_table2 matrix_peak"

step() { # name, seconds, command
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$results/$name.log" 2>&1
    echo "$name: rc $? in $((SECONDS - start)) s"
}

for what in ${*:-check warm bench}; do
    case $what in
    check) step check 150 $python scripts/gpu_mixed.py check && tail -n 40 "$results/check.log" ;;
    sweep) step sweep 200 env OUT="$results" $python scripts/gpu_mixed.py sweep && cat "$results/sweep.log" ;;
    warm) # compile what bench will run, in parallel; these numbers are thrown away
        start=$SECONDS
        for e in $experiments; do
            case $e in qflash_table*) continue ;; esac
            timeout 150 $python -m intflash.cli bench run --device cuda -e "$e" --out "$(mktemp -d)" >/dev/null 2>&1 &
        done
        wait
        echo "warm: $((SECONDS - start)) s" ;;
    bench)
        for e in $experiments; do
            step "$e" 300 $python -m intflash.cli bench run --device cuda -e "$e" --out "$results"
        done ;;
    *)
        step "$what" 300 $python -m intflash.cli bench run --device cuda -e "$what" --out "$results"
        tail -n 60 "$results/$what.log" ;;
    esac
done
tar -C "$results" -czf "$OUT/experiments.tar.gz" .
