"""One sequence on several processes: `torchrun --nproc-per-node 4 examples/context_parallel.py`.

Each process holds some of the tokens. Attention has the bits of one process on any number of them. On GPUs the process
group is "nccl" and the tensors are on `cuda`; nothing else changes. Without torchrun it runs as one process.
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import intflash
from intflash.distributed import attention, context_parallel, counting, shard


def main() -> None:
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    # Attention alone. Each rank makes whole tensors here only to compare; a model makes its own tokens' alone.
    q, k, v = (torch.randn(1, 8, 512, 64) for _ in range(3))
    mine = [shard(x, layout="zigzag") for x in (q, k, v)]
    with counting() as traffic:
        out = attention(*mine, is_causal=True, layout="zigzag")
    expected = shard(intflash.attention(q, k, v, is_causal=True), layout="zigzag")
    equal = torch.equal(out, expected)

    # A whole model: every rank calls it with the whole input and gets the whole output.
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128,
    )  # fmt: skip
    model, tokens = LlamaForCausalLM(config).eval(), torch.randint(0, 256, (1, 200))
    scales = intflash.calibrate(model, [{"input_ids": tokens}])
    with intflash.patch(model, scales=scales), torch.no_grad():
        alone = model(tokens, use_cache=False).logits
        with context_parallel(model):
            logits = model(tokens).logits
    difference = ((logits - alone).abs().max() / alone.abs().max()).item()

    if rank == 0:
        print(f"{ranks} processes, the bits of one: {equal}; {traffic.total:.0f} bytes sent by each")
        print(f"the model's logits {tuple(logits.shape)}, largest difference {difference:.0e} (the float layers')")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
