"""IntFlash: integer and INT8 FlashAttention for inference, the same bits on every backend."""

from intflash.api import attention, sdpa, which_backend, which_method
from intflash.errors import BackendError, InputError
from intflash.inventory import info
from intflash.models import calibrate, patch, unpatch
from intflash.numerics.exp import quantize_bias
from intflash.quant import QTensor, Recipe, quantize

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "InputError",
    "QTensor",
    "Recipe",
    "attention",
    "calibrate",
    "info",
    "patch",
    "quantize",
    "quantize_bias",
    "sdpa",
    "unpatch",
    "which_backend",
    "which_method",
]
