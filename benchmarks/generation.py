"""What a token of generated text takes in a language model of transformers: torch's attention, and patched models with
a KV cache of floats and of int8 codes.

Layers are those of TinyLlama 1.1B with random weights, in float32 on a CPU and float16 on a GPU. Wall clock of a
forward of one token, which is host time for the most part on a GPU: transformers queues each operation by itself.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator

import torch

import intflash
from intflash.bench.experiments import Experiment, Figure, Row, Setting

LAYERS, LENGTHS, TOKENS = 4, (512, 2048, 8192), 16
PROMPT_PART = 512  # tokens of the prompt in one forward
METHOD, METRIC = "intflash_bfp", "ms a token"


def _measure(setting: Setting) -> Iterator[Row]:
    import transformers

    from intflash.models.transformers_cache import Int8Cache

    torch.manual_seed(setting.seed)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2 * max(LENGTHS),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(setting.device)
    prompt = torch.randint(0, 32000, (1, max(LENGTHS)), device=setting.device)
    some = [{"input_ids": prompt[:, :PROMPT_PART]}]
    scales = intflash.calibrate(model, some, granularity={"k": "head", "v": "head"})
    if setting.device == "cuda":
        model = model.half()
    patched = copy.deepcopy(model)
    intflash.patch(patched, METHOD, scales)
    for length in LENGTHS[:1] if setting.quick else LENGTHS:
        setting.log(f"{length} tokens")
        caches = {
            "torch, floats": (model, transformers.DynamicCache(config=config)),
            "patched, floats": (patched, transformers.DynamicCache(config=config)),
            "patched, Int8Cache": (patched, Int8Cache(patched)),
        }
        for part in prompt[:, :length].split(PROMPT_PART, dim=1):
            for owner, cache in caches.values():
                owner(part, past_key_values=cache, logits_to_keep=1)
        taken: dict[str, list[float]] = {series: [] for series in caches}
        for _ in range(TOKENS):
            for series, (owner, cache) in caches.items():
                start = time.perf_counter()
                token = owner(prompt[:, :1], past_key_values=cache).logits.argmax(-1)
                token.item()  # waits for a GPU
                taken[series].append((time.perf_counter() - start) * 1e3)
        for series, times in taken.items():
            yield Row(series, f"{length} tokens", METRIC, statistics.median(times), x=length)


EXPERIMENTS = (
    Experiment(
        name="generation",
        title=f"A token of generated text, {LAYERS} layers of TinyLlama",
        source="docs/guide/transformers.md",
        measure=_measure,
        figures=(Figure(METRIC, "lines", "tokens in the cache"),),
        notes=f"Random weights, one sequence; {METHOD}, static scales. Models take turns, medians of {TOKENS} tokens, "
        "wall clock.",
        limit_s=300.0,
    ),
)
