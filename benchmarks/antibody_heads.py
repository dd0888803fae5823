"""SQNR of every attention head of a trained language model, by method: AntiBERTy, 26 M parameters, 8 layers of 8 heads.

    pip download --no-deps antiberty==0.1.3     # 97 MB, weights included
    python -m benchmarks.antibody_heads antiberty-0.1.3-py3-none-any.whl

The model's forward pass is written here in plain torch.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import intflash
from benchmarks import antiberty
from intflash import Recipe
from intflash.bench.accuracy import ceiling
from intflash.bench.measure import METRICS, environment, exact_attention

METHODS = (
    "intflash_bfp", "intflash", "intflash_p8", "intflash_online", "int_flash_full", "int_flash_half", "qflash", "fp8",
    "fp16",
)  # fmt: skip
OUT = Path(__file__).parent / "results" / "accuracy"
SEQUENCES = antiberty.CALIBRATION[:3]  # both domains of trastuzumab and the heavy one of rituximab


def attention_inputs(wheel: str, sequence: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v ``[1, heads, tokens, 64]`` of every layer for one sequence."""
    config, weights, vocabulary = antiberty.read(wheel)
    prefix = next(name for name in weights if name.endswith("embeddings.word_embeddings.weight"))
    prefix = prefix.removesuffix("embeddings.word_embeddings.weight")

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], scale, shift, config["layer_norm_eps"])

    ids = torch.tensor([vocabulary.index(token) for token in ("[CLS]", *sequence, "[SEP]")])
    table = {
        kind: weights[f"{prefix}embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")
    }
    x = table["word"][ids] + table["position"][: len(ids)] + table["token_type"][0]
    x = norm(x, "embeddings.LayerNorm")
    heads = config["num_attention_heads"]
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{layer}attention.self.{name}").unflatten(-1, (heads, -1)).transpose(0, 1)[None]
            for name in ("query", "key", "value")
        )
        yield q, k, v
        attended = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        x = norm(linear(attended, layer + "attention.output.dense") + x, layer + "attention.output.LayerNorm")
        hidden = F.gelu(linear(x, layer + "intermediate.dense"))
        x = norm(linear(hidden, layer + "output.dense") + x, layer + "output.LayerNorm")


def rows(wheel: str) -> Iterator[dict[str, float]]:
    sqnr = METRICS["SQNR dB"]
    for number, sequence in enumerate(SEQUENCES):
        for layer, tensors in enumerate(attention_inputs(wheel, sequence)):
            for head in range(tensors[0].shape[1]):
                q, k, v = (x[:, head : head + 1].contiguous() for x in tensors)
                exact = exact_attention(q, k, v)
                row = dict(
                    sequence=number, layer=layer, head=head, ceiling=sqnr(exact, ceiling(q, k, v, None, Recipe()))
                )
                for method in METHODS:
                    row[method] = sqnr(exact, intflash.attention(q, k, v, method=method, out_dtype=torch.float32))
                yield row


def main(path: str) -> None:
    found = list(rows(path))
    with (OUT / "antibody_heads.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, found[0])
        table.writeheader()
        table.writerows({k: round(v, 3) for k, v in row.items()} for row in found)
    summary = {}
    for method in METHODS:
        loss = torch.tensor([row["ceiling"] - row[method] for row in found])
        summary[method] = dict(median_loss_db=loss.median().item(), largest_loss_db=loss.max().item())
        print(f"{method}: below the ceiling by {loss.median():.2f} dB in the median head, {loss.max():.2f} at most")
    record = dict(name="antibody_heads", heads=len(found), summary=summary, environment=environment())
    (OUT / "antibody_heads.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
