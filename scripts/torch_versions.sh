#!/bin/sh
# The tests that depend on torch, with the oldest torch that pyproject.toml allows and with the newest that pip finds.
# `sh scripts/torch_versions.sh PYTHON FOLDER` makes one venv for each below FOLDER. PYTHON holds an installed intflash,
# whose native module and other packages they use. On x86-64 each torch is a download of gigabytes.
set -eu
cd "$(dirname "$0")/.."
python=$1 folder=$2 failed=
packages=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
oldest=$(sed -n 's/^ *"torch>=\([0-9.]*\)",$/\1/p' pyproject.toml)
for requirement in "torch==$oldest.*" torch; do
  venv=$folder/$(printf %s "$requirement" | tr -c 'a-z0-9.\n' _)
  test -x "$venv/bin/python" || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --upgrade "$requirement" numpy
  # Its own packages come first in sys.path, so that torch and triton are the venv's.
  own=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  echo "import site; site.addsitedir('$packages')" > "$own/intflash.pth"
  "$venv/bin/python" -c "import torch; print('torch', torch.__version__)"
  "$venv/bin/python" -m pytest -n "$(nproc)" -m 'not full' tests/test_*.py tests/quant tests/backends/test_portable.py \
    --deselect tests/test_examples.py --deselect tests/test_documents.py --deselect tests/test_cli.py || failed="$failed $requirement"
done
test -z "$failed" || { echo "tests failed with:$failed"; exit 1; }
