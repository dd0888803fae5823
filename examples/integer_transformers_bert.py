"""A transformers BERT as an integer model: sequences of any length up to the calibrated one, padding included."""

import torch
from transformers import BertConfig, BertForMaskedLM

from intflash import integer


def main() -> None:
    torch.manual_seed(0)
    # A small BERT with random weights; yours is BertForMaskedLM.from_pretrained("bert-base-uncased").
    config = BertConfig(
        vocab_size=200, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    model = BertForMaskedLM(config).eval()

    def tokens(count: int, length: int, real: int) -> dict[str, torch.Tensor]:
        mask = torch.arange(length).expand(count, length) < real  # yours: what the tokenizer returns
        return {"input_ids": torch.randint(0, 200, (count, length)), "attention_mask": mask.long()}

    # Pad a batch to the longest sequence that the integer model shall take; padding itself is not observed.
    calibration = integer.calibrate(model, [tokens(16, 32, 30), tokens(16, 20, 20)])
    made = integer.convert(model, calibration)
    print(made.report().splitlines()[1])

    batch = tokens(4, 24, 24)
    with torch.no_grad():
        reference, logits = model(**batch).logits, made(**batch).logits
    sqnr = 20 * torch.log10(reference.norm() / (logits - reference).norm())
    print(f"logits: {sqnr:.1f} dB, same tokens: {(logits.argmax(-1) == reference.argmax(-1)).float().mean():.0%}")

    padded = {name: torch.nn.functional.pad(x, (0, 8)) for name, x in batch.items()}
    print(f"padding changes them: {not torch.equal(made(**padded).logits[:, :24], logits)}")


if __name__ == "__main__":
    main()
