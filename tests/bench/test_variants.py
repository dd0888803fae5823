"""The papers' variants keep the order that the papers and docs/numerics.md report."""

import pytest
import torch

from benchmarks import variants
from intflash.methods import get_method
from intflash.problem import Problem
from intflash.quant import Recipe
from oracle import float64_attention, randn, sqnr, uniform

A2, A7 = (1, 6, 197, 64), (1, 24, 49, 32)


def quantized(tensors, method="qflash", recipe=None):
    recipe = get_method(method).recipe if recipe is None else recipe
    return Problem(method, *tensors, tensors[0].shape[3] ** -0.5, recipe=recipe).quantized()


@pytest.fixture(scope="module", params=[A2, A7], ids=["A2", "A7"])
def inputs(request):
    tensors = uniform(4, *request.param)
    return tensors, float64_attention(*tensors)


def test_every_qflash_variant_works_on_the_papers_inputs(inputs):
    tensors, exact = inputs
    decibels = {n: sqnr(exact, f(quantized(tensors))) for n, f in variants.QFLASH_VARIANTS.items()}
    assert all(29 < x < 34 for x in decibels.values()), decibels
    assert decibels["as published"] == sqnr(exact, get_method("qflash").reference(quantized(tensors)).out)
    assert decibels["all divided (iflash)"] == sqnr(exact, get_method("iflash").reference(quantized(tensors)).out)
    assert abs(decibels["quotient divided"] - decibels["as published"]) < 0.3  # QFlash C2: the shift costs nothing
    assert decibels["I-FlashAttention as printed"] < decibels["all divided (iflash)"] - 0.7  # normalized int8 P


def test_per_head_scales_work_as_per_tensor_ones(inputs):
    tensors, exact = inputs
    tensor, head = (
        sqnr(exact, get_method("qflash").reference(quantized(tensors, recipe=r)).out)
        for r in variants.GRANULARITIES.values()
    )
    assert head == pytest.approx(tensor, abs=0.3)  # all heads have the same distribution


def test_the_printed_requantization_survives_a_small_scale():
    """randn x 0.01: req_M of the authors' program is 0; Eq. 9's normalized multiplier keeps its bits."""
    q, k, v = randn(1, 1, 192, 64)
    problem, exact = quantized([q * 0.01, k * 0.01, v]), float64_attention(q * 0.01, k * 0.01, v)
    published, printed = (sqnr(exact, variants.QFLASH_VARIANTS[n](problem)) for n in ("as published", "as printed"))
    assert published < 0.5 and printed > 5


def test_scale_release_holds_where_scale_accumulation_collapses(inputs):
    """QFlash Figure 5: SQNR against the number of tiles."""
    tensors, exact = inputs
    problem = quantized(tensors)

    def decibels(variant, tiles, **options):
        return sqnr(exact, variant(problem, tile=-(-exact.shape[2] // tiles), **options))

    release = {t: decibels(variants.scale_release, t) for t in (1, 2, 4, 8)}
    assert all(x > 31.5 for x in release.values())
    for bits, serves in ((32, (1, 2)), (64, (1, 2, 4))):
        accumulated = {t: decibels(variants.scale_accumulation, t, bits=bits) for t in (1, 2, 4, 8)}
        assert all((abs(x - release[t]) < 0.2) if t in serves else (x < 1) for t, x in accumulated.items())


def test_summing_the_quantized_p_costs_int_flash_one_decibel(inputs):
    """numerics.md: the paper's line 12 is 1 dB worse than the authors' program."""
    tensors, exact = inputs
    problem = quantized(tensors, "int_flash_full")
    printed = sqnr(exact, variants.int_flash_as_printed(problem))
    program = sqnr(exact, get_method("int_flash_full").reference(problem).out)
    assert 0.5 < program - printed < 2


def test_variants_serve_masks():
    q, k, v = uniform(4, 1, 2, 40, 32)
    keep = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(0)) > 0.3
    problem = Problem("qflash", q, k, v, 32**-0.5, recipe=Recipe(rule="divide"), keep=keep).quantized()
    exact = float64_attention(q, k, v, keep=keep)
    more = {"release": variants.scale_release, "accumulation": lambda p: variants.scale_accumulation(p, tile=40)}
    for name, variant in (variants.QFLASH_VARIANTS | more).items():
        assert sqnr(exact, variant(problem)) > 25, name
