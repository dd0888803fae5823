"""The digit models. Their blocks take the attention function as an argument, and a patched block passes IntFlash's."""

from __future__ import annotations

from torch import Tensor, nn

from intflash.digits.layers import Attention, Block
from intflash.digits.swin import WindowBlock
from intflash.models.base import Adapter


class _Block(Block):
    def attend(self, x: Tensor, attention: Attention, bias: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        def core(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
            return self.intflash_attention(q, k, v, keep, bias=bias)

        return super().attend(x, core, bias, keep)


class _WindowBlock(_Block, WindowBlock):
    pass


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {Block: _Block, WindowBlock: _WindowBlock}


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | None:
    return _CLASSES.get(type(module))


ADAPTER = Adapter(_patched_class)
