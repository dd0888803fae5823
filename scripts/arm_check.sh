#!/usr/bin/env bash
# The CPU kernels' tests on emulated Arm processors: one without the dot product, one with it, one with FEAT_I8MM too.
# Cross-compiles, and runs an arm64 Python by QEMU; bits only, an emulator's times say nothing. Needs root on Debian 12
# (x86-64) with Python 3.11; everything goes to $WORK. Arguments are pytest's (-k test_largest_sums).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
mkdir -p "${WORK:=results/arm}"
WORK=$(cd "$WORK" && pwd)
site=$WORK/site root=$WORK/root build=$WORK/build

if ! type qemu-aarch64-static aarch64-linux-gnu-g++ mmdebstrap cmake ninja >/dev/null 2>&1; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends qemu-user-static g++-aarch64-linux-gnu mmdebstrap cmake ninja-build >/dev/null
fi
if [ ! -d "$root" ]; then
    mmdebstrap --quiet --variant=extract --arch=arm64 --include=python3.11,libpython3.11-dev,libgomp1,libstdc++6,libopenblas0-pthread \
        bookworm "$root" "deb http://deb.debian.org/debian bookworm main"
fi
if [ ! -d "$site" ]; then  # torch 2.8: later wheels for arm64 want CUDA's libraries
    "$python" -m pip install --quiet --target "$site" --no-deps --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
        torch==2.8.0 triton numpy sympy mpmath networkx jinja2 MarkupSafe filelock fsspec typing_extensions \
        pytest pluggy iniconfig packaging pygments hypothesis sortedcontainers
fi
"$python" -m pip install --quiet nanobind
mkdir -p "$WORK/include/aarch64-linux-gnu"  # of the root's /usr/include only what Debian's pyconfig.h asks for
ln -sfn "$root/usr/include/aarch64-linux-gnu/python3.11" "$WORK/include/aarch64-linux-gnu/python3.11"
cmake -S . -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-I$WORK/include" \
    -DPython_EXECUTABLE="$python" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >/dev/null
rm -f "$build"/_native*.so
cmake --build "$build"
mv "$build"/_native*.so "$build/_native.abi3.so"  # named after the host's interpreter until here

export PYTHONPATH=$site:$PWD/src:$PWD/tests INTFLASH_TEST_NATIVE=$build
for cpu in cortex-a72:generic neoverse-n1:neon max:neoni8mm; do
    run=(qemu-aarch64-static -cpu "${cpu%:*}" -L "$root" "$root/usr/bin/python3.11")
    found=$("${run[@]}" -c "import backends.sanitized_native; from intflash.backends import cpu; print(cpu.instruction_sets()[0])")
    echo "${cpu%:*}: $found"
    [ "$found" = "${cpu#*:}" ]
    "${run[@]}" -m pytest -p no:cacheprovider -p backends.sanitized_native tests/backends/test_cpu{,_inputs,_calls}.py tests/integer/test_integer_cpu.py \
        -k "not forked and not short_of" "$@"
done
