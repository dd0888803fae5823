"""Patched models of transformers and diffusers with their tokens on several ranks."""

import importlib.util
import re

import pytest

from distributed.processes import answers, run

REFUSED = {
    "no model": "takes an nn.Module, got str",
    "not patched": r"call intflash.patch\(model, ...\) first",
    "default causal": "computes method 'int_flash_half', sharded attention has intflash, .* static scales",
    "window": "has layers of sliding_attention: only full attention",
    "vit": "does not take input_ids and position_ids",
    "t5": "does not take input_ids and position_ids|relative position bias|an encoder and a decoder",
    "unet": "has no context parallel plan",
    "library": "serves models of transformers and diffusers, this one is of .*digits",
    "layout": "layout must be one of",
    "twice": "under context parallelism already",
    "mask": r"takes an attention_mask \[batch, tokens\]",
    "attentions": "output_attentions",
    "cache": "a KV cache .* is not served by context_parallel",
    "unpatched": r"was unpatched under context parallelism: remove\(\) that before intflash.unpatch",
}


WORLDS = [pytest.param(world, marks=() if world == 2 else pytest.mark.full) for world in (1, 2, 3, 4)]


@pytest.mark.parametrize("world", WORLDS)
def test_models(world):
    for library in ("transformers", "diffusers"):
        if importlib.util.find_spec(library) is None:  # importing them takes longer than the test
            pytest.skip(f"{library} is not installed")
    cases = "transformers_models" if world == 3 else "all_models"  # the tokens of diffusers' are not 3's
    for found in answers(run(world, f"distributed.model_cases:{cases}")):
        transformers, diffusers, refused = (found, {}, None) if world == 3 else found
        assert len(transformers) == 7 and max(transformers.values()) < 1e-5, transformers
        assert max(diffusers.values(), default=0) < 1e-4, diffusers
        if refused is None:
            continue
        assert refused.keys() == REFUSED.keys()
        for name, pattern in REFUSED.items():
            assert re.search(pattern, refused[name]), f"{name}: {refused[name]}"
