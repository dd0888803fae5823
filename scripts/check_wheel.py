"""What an installed wheel must do: the native module loads, serves small calls and has the reference's bits.

`cibuildwheel` runs it on every wheel that it builds (pyproject.toml).
"""

import torch

import intflash
from intflash.backends import cpu
from intflash.call import NAMES, complete

found = cpu.instruction_sets()
assert len(found) > 1, f"expected kernels of this machine's instruction sets beside the generic ones, got {found}"
q, k, v = torch.randn(3, 2, 4, 50, 32).unbind()
for method in ("intflash", "intflash_p8", "intflash_online"):
    arguments = complete((q, k, v), dict(method=method))
    out = cpu.attend(*(arguments[name] for name in NAMES))
    assert out is not None, "the native call path does not find torch's functions"
    assert torch.equal(out, intflash.attention(q, k, v, method=method, backend="reference")), method
print("wheel serves with", ", ".join(found), "under torch", torch.__version__)
