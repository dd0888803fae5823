"""A transformers BERT with integer attention and a padding mask."""

import torch
from transformers import BertConfig, BertModel

import intflash


def main() -> None:
    torch.manual_seed(0)
    # A small BERT with random weights; yours is BertModel.from_pretrained("bert-base-uncased").
    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    model = BertModel(config).eval()
    ids = torch.randint(0, 1000, (2, 48))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0  # the second sequence has 30 tokens, the rest is padding
    batch = {"input_ids": ids, "attention_mask": mask}

    # Static scales: those found in a call are of all tokens, padding included.
    scales = intflash.calibrate(model, [batch])  # yours: some hundred sequences
    with torch.inference_mode():
        reference = model(**batch).last_hidden_state
        with intflash.patch(model, "intflash", scales) as report:
            hidden = model(**batch).last_hidden_state
            other = ids.clone()
            other[1, 30:] = 7  # other tokens where the mask is 0
            padded = model(**batch | {"input_ids": other}).last_hidden_state
    print(report)
    real = mask.bool()
    sqnr = 20 * torch.log10(reference[real].norm() / (hidden - reference)[real].norm())
    print(f"hidden states: {sqnr:.1f} dB")
    print(f"other padding tokens change them: {not torch.equal(padded[real], hidden[real])}")


if __name__ == "__main__":
    main()
