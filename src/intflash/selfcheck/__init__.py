"""The self-check: random problems on every backend of this machine, beside the reference.

`intflash selfcheck` runs it. Integer methods must give the reference's bits, float methods stay within a stated
tolerance (`compare.LEAST_DB`); what a backend cannot serve it must refuse in words.
"""

from intflash.selfcheck.cases import Case, generate
from intflash.selfcheck.compare import check, places
from intflash.selfcheck.session import Report, run
from intflash.selfcheck.source import Place, build, code

__all__ = ["Case", "Place", "Report", "build", "check", "code", "generate", "places", "run"]
