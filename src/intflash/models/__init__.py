"""IntFlash inside real models: patching, calibration and evaluation.

An adapter for another library is another file here, named like the library, that exports ADAPTER.
"""

from intflash.models.calibration import calibrate
from intflash.models.patch import Patch, patch, unpatch

__all__ = ["Patch", "calibrate", "patch", "unpatch"]
