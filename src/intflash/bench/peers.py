"""Attention of other projects, which is timed where it is installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

logger = logging.getLogger("intflash")

# module -> its function of float16 (q, k, v), each [B, H, N, D], with quantization inside
PEERS = {"sageattention": "sageattn", "comfy_kitchen": "int8_attention"}


def installed() -> Iterator[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """Returns (name, function) of the peers that can be imported here."""
    for module, function in PEERS.items():
        try:
            yield module, getattr(importlib.import_module(module), function)
        except Exception as error:  # not installed, a version without it, a build for another machine
            logger.debug("%s is not timed: %s", module, error)


def installed_fp8() -> Iterator[tuple[str, Callable[..., Callable[[], object]]]]:
    """Returns (name, maker) of the FP8 attention that can be imported here. maker(q, k, v, is_causal) takes float8
    ``[B, H, N, D]`` with unit scales and returns a call with 16-bit output.
    """
    for name, (module, maker) in FP8_PEERS.items():
        try:
            yield name, _with_module(importlib.import_module(module), maker)
        except Exception as error:
            logger.debug("%s is not timed: %s", module, error)


def _with_module(module: ModuleType, maker: Callable[..., Callable[[], object]]) -> Callable[..., Callable[[], object]]:
    return lambda q, k, v, is_causal: maker(module, q, k, v, is_causal)


def _flash_attention_3(module: ModuleType, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Callable[[], object]:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    ones = torch.ones(q.shape[0], k.shape[2], device=q.device)
    scales = dict(q_descale=ones, k_descale=ones, v_descale=ones)
    return lambda: module.flash_attn_func(q, k, v, causal=is_causal, **scales)


def _cudnn_fp8(cudnn: ModuleType, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Callable[[], object]:
    kinds = cudnn.data_type
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
    )
    memory = {}

    def tensor(name: str, x: Tensor, kind: object) -> object:
        made = graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind)
        memory[made] = x
        return made

    one = torch.ones(1, 1, 1, 1, device=q.device)
    codes = {n: tensor(n, x.view(torch.int8), kinds.FP8_E4M3) for n, x in (("q", q), ("k", k), ("v", v))}
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: tensor(name, one.clone(), kinds.FLOAT) for name in names}
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        **codes, **scales, is_inference=True, attn_scale=q.shape[3] ** -0.5, use_causal_mask=is_causal, name="sdpa"
    )
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.bfloat16, device=q.device)
    results = ((o, out, kinds.BFLOAT16), (amax_s, one.clone(), kinds.FLOAT), (amax_o, one.clone(), kinds.FLOAT))
    for made, x, kind in results:
        made.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
        memory[made] = x
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=q.device)

    def run() -> Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(memory, workspace, handle=handle)
        return out

    return run


# name -> its module, and what makes a call
FP8_PEERS = {"FlashAttention-3 FP8": ("fa3_fwd_interface", _flash_attention_3), "cuDNN FP8": ("cudnn", _cudnn_fp8)}
