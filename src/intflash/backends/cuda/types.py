"""C++ names of the dtypes in kernels/."""

import torch

C_TYPES = {
    torch.int8: "i8",
    torch.int16: "i16",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat_t",
    torch.float32: "float",
}
