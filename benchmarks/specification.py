"""The table of docs/numerics.md, section 2: accuracy of IntFlash's methods on the inputs of tests/test_accuracy.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from intflash.bench.experiments import Row, Setting, untimed

TESTS = Path(__file__).parents[1] / "tests"
METHODS = ("intflash", "intflash_p8", "intflash_online", "intflash_bfp")
OUTPUTS = {"float": torch.float32, "int16": torch.int16}


def _measure(setting: Setting) -> Iterator[Row]:
    sys.path.insert(0, str(TESTS))
    import test_accuracy

    for case in list(test_accuracy.COLUMNS)[: 2 if setting.quick else None]:
        setting.log(case)
        yield Row("ceiling", case, "SQNR dB", test_accuracy.case(case)[2])
        for method in METHODS:
            for label, dtype in OUTPUTS.items():
                yield Row(f"{method}, {label}", case, "SQNR dB", test_accuracy.measured(case, method, dtype))


EXPERIMENTS = (
    untimed(
        name="specification",
        title="IntFlash's methods on every column of docs/numerics.md",
        source="docs/numerics.md, section 2",
        measure=_measure,
        notes="The inputs of tests/test_accuracy.py, whose seeds are fixed.",
    ),
)
