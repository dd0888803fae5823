"""Codes of one tensor by Triton's kernel in its interpreter: prints what differs from the library's definition."""

import interpreter  # noqa: F401, I001  before triton decides
import json

import torch

from intflash.backends.triton.quantize import codes_launch
from intflash.quant.quantizers import codes_of

SCALES = {"tensor": (1, 1, 1, 1), "head": (2, 3, 1, 1), "shared head": (1, 3, 1, 1), "token": (2, 3, 133, 1)}
SCALES |= {"channel": (2, 3, 1, 40)}


def main() -> None:
    torch.manual_seed(0)
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for name, shape in (SCALES if dtype == torch.float32 else {"tensor": (1, 1, 1, 1)}).items():
            x = torch.randn(2, 133, 3, 40).to(dtype).transpose(1, 2)  # a model's layout
            scale = torch.rand(shape) * 0.01 + 0.005  # some values pass the range
            for layout in ("tokens", "keys"):
                out, room, padding = torch.zeros(2, 3, 133, 40, dtype=torch.int8), None, 1
                if layout == "keys":
                    room, padding = torch.full((2, 3, 40, 150), 5, dtype=torch.int8), 16
                    out = room[..., :133].mT
                codes_launch(x, scale, out, padding).run()
                wrong = int((out != codes_of(x.float(), scale, 8, "exact")).sum())
                if room is not None:  # zeros up to 144, nothing behind
                    wrong += int(room[..., 133:144].count_nonzero()) + int((room[..., 144:] != 5).sum())
                found[f"{dtype} {name} {layout}"] = wrong
    print(json.dumps(found))


if __name__ == "__main__":
    main()
