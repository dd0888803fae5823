"""Whole models on integers, from the quantized image to the logits: calibrate, convert, save, load."""

from intflash.integer.calibration import Calibration, calibrate
from intflash.integer.convert import convert
from intflash.integer.file import load
from intflash.integer.lower import Options
from intflash.integer.model import IntegerModel

__all__ = ["Calibration", "IntegerModel", "Options", "calibrate", "convert", "load"]
