"""`convert`: from a calibrated float model to an `IntegerModel`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from intflash.errors import InputError
from intflash.integer.calibration import Calibration
from intflash.integer.lower import Options, lower
from intflash.integer.model import IntegerModel
from intflash.integer.registry import translate


def convert(model: nn.Module, calibration: Calibration, *, backend: str | None = None, **options: Any) -> IntegerModel:
    """An integer model with the same call and output as `model`.

    Args:
        model: the model that was calibrated, in evaluation mode; not changed.
        calibration: of `calibrate`.
        backend: as for `IntegerModel`.
        options: the fields of `Options`: method, residual_bits, activation_bits, observer, fold, scales, image, mean,
            std.

    Returns:
        The model; its constants are on the device of the float model.

    Raises:
        InputError: a module has no integer form, the model was changed after calibration, a layer's range is zero or a
            declared width would be left (each names the layer), or an option is unknown.

    Example:
        >>> import torch
        >>> from intflash import integer
        >>> from intflash.digits import load_model
        >>> float_model = load_model("vit")
        >>> images = torch.rand(8, 1, 8, 8)
        >>> model = integer.convert(float_model, integer.calibrate(float_model, [images]))
        >>> model(images).shape
        torch.Size([8, 10])
    """
    if not isinstance(calibration, Calibration):
        raise InputError(f"convert takes what calibrate returned, got {type(calibration).__name__}")
    try:
        chosen = Options(**options)
    except TypeError:
        known = ", ".join(asdict(Options()))
        raise InputError(f"options of convert are {known}, backend; got {', '.join(options)}") from None
    graph = translate(model, calibration.size).check()
    calibration.check(model, graph)
    program = lower(graph, calibration, chosen)
    provenance = {
        "model": calibration.model, "images": calibration.images, "fingerprints": calibration.fingerprints,
        "versions": calibration.versions, "options": asdict(chosen),
    }  # fmt: skip
    made = IntegerModel(program, provenance, backend=backend)
    parameter = next(model.parameters(), None)
    return made if parameter is None else made.to(parameter.device)
