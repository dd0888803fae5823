"""Integer attention in a module of your own, in place of torch's scaled_dot_product_attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intflash


class SelfAttention(nn.Module):
    """Attention with a learned bias per head. `integer` chooses who computes it."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.integer = heads, True
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(1, heads, tokens, tokens))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.integer:
            # A bool mask and a bias stand side by side; neither is expanded over batch or heads.
            recipe = intflash.Recipe(q="head", k="head", v="head")
            y = intflash.attention(q, k, v, keep, bias=self.bias, method="intflash_p8", recipe=recipe)
        else:
            y = F.scaled_dot_product_attention(q, k, v, self.bias.masked_fill(~keep, float("-inf")))
        return self.out(y.transpose(1, 2).flatten(2))


def main() -> None:
    torch.manual_seed(0)
    module = SelfAttention(width=128, heads=4, tokens=50).eval()
    x = torch.randn(3, 50, 128)
    keep = torch.ones(3, 1, 1, 50, dtype=torch.bool)
    keep[2, ..., 35:] = False  # the third sequence is shorter

    with torch.inference_mode():
        out = module(x, keep)
        module.integer = False
        reference = module(x, keep)
    sqnr = 20 * torch.log10(reference.norm() / (out - reference).norm())
    print(f"integer attention: {sqnr:.1f} dB from torch's")

    # Where there is neither mask nor bias, the drop-in needs no other change:
    q = torch.randn(3, 4, 50, 32)
    print(intflash.sdpa(q, q, q).shape, "on backend", intflash.which_backend(q, q, q))


if __name__ == "__main__":
    main()
