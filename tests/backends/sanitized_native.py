"""pytest plugin of scripts/sanitize_cpu.sh: the native module of a build folder in place of the installed one."""

import importlib.util
import os
import sys
from pathlib import Path

import torch  # noqa: F401 - its libraries before the sanitized one

NAME = "intflash._native"
path = next(Path(os.environ["INTFLASH_TEST_NATIVE"]).glob("_native*.so"))
spec = importlib.util.spec_from_file_location(NAME, path)
module = importlib.util.module_from_spec(spec)
sys.modules[NAME] = module
spec.loader.exec_module(module)

from intflash.backends import cpu  # noqa: E402

cpu._native = module
cpu.use_native(module)
cpu.attend, cpu.attend_flat = module.attend, module.attend_flat
