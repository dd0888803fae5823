"""Text generation by a transformers Llama with integer attention, grouped KV heads and a KV cache.

A causal model needs static scales: scales found in each call would depend on the tokens after a query.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import intflash


def main() -> None:
    torch.manual_seed(0)
    # A small Llama with random weights; yours is LlamaForCausalLM.from_pretrained(...).
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    texts = [{"input_ids": torch.randint(1, 256, (2, 64))} for _ in range(2)]  # yours: text like that of deployment
    prompt = torch.randint(1, 256, (1, 24))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)

    scales = intflash.calibrate(model, texts, method="intflash")
    expected = model.generate(prompt, **options)
    with intflash.patch(model, scales=scales) as report:
        tokens = model.generate(prompt, **options)
        with torch.inference_mode():
            logits = model(prompt).logits
            longer = model(torch.cat([prompt, prompt[:, :8]], dim=1)).logits
    print(report)
    print("float attention:  ", expected[0, 24:].tolist())
    print("integer attention:", tokens[0, 24:].tolist())
    drift = (longer[:, :24] - logits).abs().max() / logits.abs().max()
    print(f"later tokens move earlier logits by {drift:.0e} of the largest (the float layers' rounding)")


if __name__ == "__main__":
    main()
