"""Quantization of attention's inputs."""

from intflash.quant.qtensor import GRANULARITIES, QTensor
from intflash.quant.quantizers import Recipe, hadamard_rotate, key_mean, quantize

__all__ = ["GRANULARITIES", "QTensor", "Recipe", "hadamard_rotate", "key_mean", "quantize"]
