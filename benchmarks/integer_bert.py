"""Accuracy of a trained BERT as an integer model: AntiBERTy, 26 M parameters, masked residues of antibodies.

    pip download --no-deps antiberty==0.1.3     # 97 MB, weights included
    ANTIBERTY=antiberty-0.1.3-py3-none-any.whl python -m benchmarks.integer_bert benchmarks/results/accuracy

takes some minutes on two cores and needs transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intflash
from benchmarks import antiberty
from benchmarks.integer_accuracy import PAPERS, PaperFunctions
from intflash import InputError, integer
from intflash.bench.experiments import Row, Setting, run_experiment, untimed
from intflash.integer.calibration import bind
from intflash.integer.registry import translate
from intflash.integer.simulate import simulate

WHEEL = "ANTIBERTY"  # the environment variable that names the wheel
STRIDE = 8  # every 8th residue is masked at once, in 8 passes: each is predicted once
BATCH, LENGTH = 16, 128  # sequences, tokens
CASE = "AntiBERTy"
PERPLEXITY, SAME, RIGHT = "perplexity of masked residues", "predictions as float32's, %", "residues recovered, %"

METHODS = ("intflash", "intflash_p8")
ABLATIONS = {  # name -> options of convert
    "residual of 32 bits": {"residual_bits": 32},
    "8 bits before GELU": {"activation_bits": 8},
    "12 bits before GELU": {"activation_bits": 12},
    "no folding": {"fold": False},
    "scales per tensor": {"scales": "tensor"},
    "percentile": {"observer": "percentile"},
    "mse": {"observer": "mse"},
}


def load() -> tuple[nn.Module, dict[str, int]]:
    """The trained model and its vocabulary, token -> id.

    Raises:
        InputError: the package's wheel is not where ANTIBERTY says.
    """
    from transformers import BertConfig, BertForMaskedLM

    config, weights, words = antiberty.read(os.environ.get(WHEEL, antiberty.WHEEL))
    model = BertForMaskedLM(BertConfig(**config))
    missing, _ = model.load_state_dict(weights, strict=False)  # it has heads of its own beside this one
    if set(missing) - {"cls.predictions.decoder.bias"}:
        raise InputError(f"AntiBERTy's checkpoint misses {missing}")
    model.tie_weights()
    return model.eval().requires_grad_(False), {word: i for i, word in enumerate(words)}


def masked(sequences: list[str], ids: dict[str, int]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Batches padded to LENGTH with every STRIDE-th residue masked, and the residues that are, elsewhere -100."""
    pairs = []
    for sequence in sequences:
        tokens = torch.tensor([ids["[CLS]"], *(ids[x] for x in sequence), ids["[SEP]"]])
        for first in range(STRIDE):
            at = torch.arange(1 + first, len(tokens) - 1, STRIDE)
            hidden, label = tokens.clone(), torch.full_like(tokens, -100)
            hidden[at], label[at] = ids["[MASK]"], tokens[at]
            pairs.append((hidden, label))
    for first in range(0, len(pairs), BATCH):
        hidden, labels = zip(*pairs[first : first + BATCH], strict=True)
        given = torch.stack([F.pad(x, (0, LENGTH - len(x)), value=ids["[PAD]"]) for x in hidden])
        labels = torch.stack([F.pad(x, (0, LENGTH - len(x)), value=-100) for x in labels])
        yield {"input_ids": given, "attention_mask": (given != ids["[PAD]"]).long()}, labels


class Comparison:
    """The float model, its predictions of the held-out residues, and its calibration."""

    def __init__(self, quick: bool) -> None:
        self.model, ids = load()
        self.batches = list(masked(antiberty.HELD_OUT[: 2 if quick else None], ids))
        self.right = torch.cat([labels[labels != -100] for _, labels in self.batches])
        self.expected = self.logits(self.model)
        self.calibration = integer.calibrate(self.model, [inputs for inputs, _ in masked(antiberty.CALIBRATION, ids)])

    def logits(self, model: Callable[..., Any]) -> Tensor:
        """Of all masked residues, ``[residues, vocabulary]``."""
        return torch.cat([model(**inputs).logits[labels != -100] for inputs, labels in self.batches])

    def simulated(self) -> Tensor:
        """The logits of float64 with the quantizers of the default options."""
        wanted = translate(self.model, self.calibration.size).inputs

        def run(**inputs: Tensor) -> SimpleNamespace:
            bound = bind(wanted, inputs, torch.device("cpu"))
            return SimpleNamespace(**simulate(self.model, self.calibration, integer.Options(), bound))

        return self.logits(run)

    def rows(self, name: str, found: Tensor) -> Iterator[Row]:
        loss = F.cross_entropy(found.double(), self.right)
        yield Row(name, CASE, PERPLEXITY, float(loss.exp()))
        yield Row(name, CASE, SAME, _percent(found.argmax(1) == self.expected.argmax(1)))
        yield Row(name, CASE, RIGHT, _percent(found.argmax(1) == self.right))

    def integer(self, name: str, options: dict[str, Any]) -> Iterator[Row]:
        return self.rows(name, self.logits(integer.convert(self.model, self.calibration, **options)))


def _percent(same: Tensor) -> float:
    return 100 * float(same.double().mean())


@torch.no_grad()
def trained(setting: Setting) -> Iterator[Row]:
    compared = Comparison(setting.quick)
    yield from compared.rows("float32", compared.expected)
    for method in METHODS:
        with intflash.patch(compared.model, method):
            yield from compared.rows(f"attention only, {method}", compared.logits(compared.model))
    for method in METHODS:
        yield from compared.integer(f"integer, {method}", {"method": method})


@torch.no_grad()
def ablations(setting: Setting) -> Iterator[Row]:
    compared = Comparison(setting.quick)
    for name, options in ABLATIONS.items():
        setting.log(name)
        yield from compared.integer(name, options)
    yield from compared.rows("float64 with the same quantizers", compared.simulated())
    graph = translate(compared.model, compared.calibration.size)
    for name, functions in PAPERS.items():
        setting.log(name)
        with PaperFunctions(*functions, graph, compared.calibration, integer.Options()):
            yield from compared.rows(f"{name}, the rest as float64", compared.simulated())


SOURCE = "docs/guide/integer-models.md"
NOTES = (
    f"Masked residues of {len(antiberty.HELD_OUT)} variable domains, every residue once ({STRIDE} passes with every "
    f"{STRIDE}th masked), calibrated on {len(antiberty.CALIBRATION)} others. Weights: antiberty 0.1.3 of PyPI, loaded "
    "as transformers' BertForMaskedLM."
)
EXPERIMENTS = (
    untimed(
        name="integer_antiberty",
        title="AntiBERTy, a trained BERT of 26 M parameters, as an integer model",
        source=SOURCE,
        measure=trained,
        notes=f"{NOTES} Attention only: intflash.patch with scales found in the call.",
        limit_s=600,
    ),
    untimed(
        name="integer_antiberty_ablations",
        title="AntiBERTy as an integer model, one option changed",
        source=SOURCE,
        measure=ablations,
        notes=f"{NOTES} All else as it is by default: residual of 16 bits, 10 bits before GELU, folding, scales per "
        "head, absmax, intflash. The papers' functions take the codes that ours take, in the float64 computation.",
        limit_s=1800,
    ),
)


if __name__ == "__main__":
    for experiment in EXPERIMENTS:
        outcome = run_experiment(experiment, Setting())
        print(*outcome.save(Path(sys.argv[1])), outcome.error or "")
