"""Every public example runs as printed."""

import doctest
import importlib

import pytest

MODULES = [
    "intflash.api",
    "intflash.bench.demo",
    "intflash.bench.measure",
    "intflash.digits",
    "intflash.digits.data",
    "intflash.digits.swin",
    "intflash.digits.vit",
    "intflash.inventory",
    "intflash.numerics.exp",
    "intflash.quant.qtensor",
    "intflash.quant.quantizers",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0
