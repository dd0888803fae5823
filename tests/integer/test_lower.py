"""From graph to program: what leaves a declared width is refused with the layer's name, and what folding keeps."""

import pytest
import torch
from torch import nn

from intflash import InputError, integer
from intflash.digits import load_model, load_split
from intflash.integer import portable, reference
from intflash.integer.calibration import Calibration, _matrix, _observed
from intflash.integer.graph import Graph
from intflash.integer.lower import Options, lower
from intflash.integer.program import Attention
from oracle import sqnr


def calibrated(graph, inputs):
    """The calibration of a graph without a model."""
    ranges = _observed(graph)
    graph.run(inputs, seen=lambda name, x: name in ranges and ranges[name].observe(_matrix(x)))
    size = graph.inputs[0].shape
    return Calibration("graph", len(next(iter(inputs.values()))), size, graph.fingerprints(), ranges, {})


def one_linear(k, bias=0.0):
    graph = Graph()
    rows = graph.patches("patches", graph.image("x", (1, 1, k)), (1, k))
    graph.output("y", graph.linear("wide", rows, torch.ones(1, k), torch.tensor([bias])), (1,))
    return graph


def test_a_linear_that_could_leave_int32_is_refused():
    for k, fits in ((66_000, True), (132_105, False)):
        graph = one_linear(k)
        inputs = {"x": torch.rand(2, 1, 1, k) - 0.5}
        calibration = calibrated(graph, inputs)
        if fits:
            lower(graph, calibration, Options())
            continue
        with pytest.raises(InputError, match=r"wide: expected K \* 128 \* 127 \+ max \|bias\| < 2\^31, got K = 132105"):
            lower(graph, calibration, Options())


def test_a_bias_that_weights_cannot_hold_widens_their_scale():
    """A bias of 2^30 weight units and more would leave int32: the scale of those weights is raised instead."""
    graph = one_linear(16, bias=1e12)
    inputs = {"x": torch.rand(4, 1, 1, 16) - 0.5}
    program = lower(graph, calibrated(graph, inputs), Options())
    found = reference.run(program, inputs)["wide"].double() * program.tensors["y.scale"].double()
    assert (found - 1e12).abs().max() < 1e12 * 2**-23  # of the float32 scale


def tokens(table, norm):
    """LayerNorm of embedded tokens, then a linear."""
    graph = Graph()
    x = graph.embedding("words", (graph.index("ids", 3, len(table)),), (table,))
    y = graph.layer_norm("norm", x, norm)
    graph.output("y", graph.linear("head", y, torch.eye(table.shape[1])), (3, table.shape[1]))
    return graph


def test_a_layer_norm_that_leaves_its_widths_is_refused():
    """A gamma of 1e12 on a channel that is always the mean: no scale of its output shows how large it is."""
    norm = nn.LayerNorm(4)
    with torch.no_grad():
        norm.weight[2] = 1e12
    graph = tokens(torch.tensor([[1.0, -1, 0, 0], [2, -2, 0, 0]]), norm)
    calibration = calibrated(graph, {"ids": torch.tensor([[0, 1, 0]])})
    with pytest.raises(InputError, match=r"norm: gamma and beta leave the widths .* the largest gamma 1e\+12"):
        lower(graph, calibration, Options())


def test_tokens_that_calibration_did_not_see_fit_the_stream():
    torch.manual_seed(0)
    table = torch.randn(50, 16)
    table[25:] *= 4
    graph = tokens(table, nn.LayerNorm(16))
    program = lower(graph, calibrated(graph, {"ids": torch.randint(0, 25, (100, 3))}), Options())
    inputs = {"ids": torch.randint(25, 50, (100, 3))}
    words = graph.run(inputs)["y"]
    assert int(program.tensors["words.table0"].abs().max()) < 32767
    assert sqnr(words, portable.run(program, inputs)["head"] * program.tensors["y.scale"]) > 28


def test_an_eps_past_its_bound_is_refused():
    """Rows of 1e-8: eps is 1e11 of their variances, and in their unit more than 2^60."""
    graph = tokens(1e-8 * torch.tensor([[1.0, -1, 0, 2], [2, -2, 1, 0]]), nn.LayerNorm(4))
    calibration = calibrated(graph, {"ids": torch.tensor([[0, 1, 0]])})
    with pytest.raises(InputError, match=r"norm: expected eps in \[1, 2\^60\], got \d+"):
        lower(graph, calibration, Options())


def test_a_relative_position_bias_past_its_bound_is_refused():
    torch.manual_seed(0)

    def graph(bias):
        graph = Graph()
        x = graph.embedding("words", (graph.index("ids", 5, 20),), (torch.randn(20, 16),))
        y = graph.layer_norm("norm", x, nn.LayerNorm(16))
        y = graph.attention("attention", *graph.heads("qkv", y, torch.randn(48, 16), None, 2), bias=bias)
        graph.output("y", graph.linear("proj", y, torch.eye(16)), (5, 16))
        return graph

    inputs = {"ids": torch.randint(0, 20, (9, 5))}
    bias = torch.zeros(1, 2, 5, 5)
    for value, fits in ((1419.5, True), (-1419.6, False)):
        bias[0, 1, 2, 3] = value
        made = graph(bias)
        calibration = calibrated(made, inputs)
        if fits:
            lower(made, calibration, Options())
            continue
        with pytest.raises(InputError, match=r"attention: the relative-position bias must lie within \+-1419.56"):
            lower(made, calibration, Options())


def test_stream_and_codes_of_one_layer_norm():
    """A LayerNorm that is read by a product and added (BERT): two operations of one input."""
    torch.manual_seed(0)
    table, weight = torch.randn(20, 16), torch.randn(16, 16)
    graph = Graph()
    x = graph.embedding("words", (graph.index("ids", 5, 20),), (table,))
    y = graph.layer_norm("norm", x, nn.LayerNorm(16))
    z = graph.linear("dense", y, weight, residual=y)
    graph.output("z", z, (5, 16))
    inputs = {"ids": torch.randint(0, 20, (50, 5))}
    program = lower(graph, calibrated(graph, inputs), Options())
    assert [op.name for op in program.operations] == ["words", "norm", "norm.stream", "dense"]
    found = portable.run(program, inputs)["dense"]
    assert torch.equal(found, reference.run(program, inputs)["dense"])
    assert sqnr(graph.run(inputs)["z"], found * program.tensors["z.scale"]) > 38


def test_a_sum_that_a_product_reads_is_refused():
    graph = Graph()
    x = graph.embedding("words", (graph.index("ids", 5, 20),), (torch.randn(20, 16),))
    y = graph.linear("dense", graph.layer_norm("norm", x, nn.LayerNorm(16)), torch.eye(16), residual=x)
    graph.output("y", graph.linear("next", y, torch.eye(16)), (5, 16))
    with pytest.raises(InputError, match="dense: expected a LayerNorm between a sum and a product"):
        lower(graph, calibrated(graph, {"ids": torch.randint(0, 20, (9, 5))}), Options())


def test_a_dead_channel_takes_no_bits_from_the_others():
    """A weight row of zeros, and a channel of LayerNorm that never moves."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(16)
    with torch.no_grad():
        norm.weight[3] = 0
    graph = Graph()
    x = graph.embedding("words", (graph.index("ids", 5, 20),), (torch.randn(20, 16),))
    weight = torch.randn(16, 16)
    weight[5] = 0
    y = graph.linear("dense", graph.layer_norm("norm", x, norm), weight, torch.randn(16))
    graph.output("y", y, (5, 16))
    inputs = {"ids": torch.randint(0, 20, (50, 5))}
    program = lower(graph, calibrated(graph, inputs), Options())
    found = portable.run(program, inputs)["dense"] * program.tensors["y.scale"]
    expected = graph.run(inputs)["y"]
    assert sqnr(expected, found) > 38 and torch.allclose(found[..., 5], expected[..., 5], rtol=1e-5)


def test_wide_stream_is_for_outliers():
    """One channel of 3000 in every token: 16 bits have few left for the others, 24 bits have enough."""
    torch.manual_seed(0)
    table, norm = torch.randn(50, 16), nn.LayerNorm(16)
    table[:, 0] = 3000
    with torch.no_grad():
        norm.weight.fill_(750)
        norm.weight[0] = 0
    graph = tokens(table, norm)
    inputs = {"ids": torch.randint(0, 50, (200, 3))}
    calibration, expected = calibrated(graph, inputs), graph.run(inputs, torch.float64)["y"][..., 1:]
    found = {}
    for bits in (16, 32):
        program = lower(graph, calibration, Options(residual_bits=bits))
        y = reference.run(program, inputs)["head"]
        assert torch.equal(y, portable.run(program, inputs)["head"])
        found[bits] = sqnr(
            expected - expected.mean((0, 1)), (y * program.tensors["y.scale"])[..., 1:] - expected.mean((0, 1))
        )
    assert found[32] > 37 and found[16] < found[32] - 6


def check_folding(model, train, images, expected, least_gain):
    """The float model is the same, and loses nothing as integers with folding, but `least_gain` dB without."""
    assert torch.allclose(model(images), expected, atol=1e-4)
    calibration = integer.calibrate(model, [train.images[:32]])
    folded, plain = (sqnr(expected, integer.convert(model, calibration, fold=fold)(images)) for fold in (True, False))
    assert folded > 38 and plain < folded - least_gain


def test_folding_is_for_channels_of_different_ranges():
    """LayerNorm's channels spread over two decades, their inverse in the next weights: the same float model."""
    train, held_out = load_split()
    model, images = load_model("vit"), held_out.images[:32]
    expected = model(images)
    spread = 10 ** torch.linspace(-1, 1, 64)
    for block in model.blocks:
        for norm, linear in ((block.norm1, block.qkv), (block.norm2, block.mlp[0])):
            norm.weight.mul_(spread)
            norm.bias.mul_(spread)
            linear.weight.div_(spread)
    check_folding(model, train, images, expected, least_gain=10)


def test_folding_is_for_values_of_different_ranges():
    """Channels of V spread over two decades, their inverse in the projection: the same float model."""
    train, held_out = load_split()
    model, images = load_model("vit"), held_out.images[:32]
    expected = model(images)
    spread = 10 ** torch.linspace(-1, 1, 16).repeat(4)
    for block in model.blocks:
        block.qkv.weight[128:].mul_(spread[:, None])
        block.qkv.bias[128:].mul_(spread)
        block.proj.weight.div_(spread)
    check_folding(model, train, images, expected, least_gain=3)


def test_scales_of_a_head_or_of_all():
    """What is chosen for Q, K and attention's output is in the program; heads of different ranges need their own."""
    train, held_out = load_split()
    model, images = load_model("vit"), held_out.images[:32]
    for block in model.blocks:
        block.qkv.weight[128:144].mul_(30)  # V of the first head, undone by the projection
        block.qkv.bias[128:144].mul_(30)
        block.proj.weight[:, :16].div_(30)
    calibration = integer.calibrate(model, [train.images[:32]])
    for scales, count in (("head", 4), ("tensor", 1)):
        made = integer.convert(model, calibration, scales=scales)
        attention = [op for op in made.program.operations if isinstance(op, Attention)]
        assert len(attention) == 4 and all(len(op.q_scale) == len(op.k_scale) == count for op in attention)
        assert all(f"scales per {scales}" in line for line in made.report().splitlines() if "attention int" in line)
    found = {s: sqnr(model(images), integer.convert(model, calibration, scales=s, fold=False)(images))
             for s in ("head", "tensor")}  # fmt: skip
    assert found["head"] > found["tensor"] + 3


@pytest.mark.parametrize("what, factor", [("queries", 1e-6), ("queries", 1e6), ("values", 1e-9), ("values", 1e9)])
def test_queries_keys_and_values_of_any_scale(what, factor):
    """Their weights are one product; each part keeps all bits of its codes, however small beside the others."""
    train, held_out = load_split()
    model, images = load_model("vit"), held_out.images[:32]
    for block in model.blocks:
        scaled, other = {"queries": (slice(0, 64), block.qkv.weight[64:128]),
                         "values": (slice(128, None), block.proj.weight)}[what]  # fmt: skip
        block.qkv.weight[scaled].mul_(factor)
        block.qkv.bias[scaled].mul_(factor)
        other.div_(factor)
        if what == "queries":
            block.qkv.bias[64:128].div_(factor)
    made = integer.convert(model, integer.calibrate(model, [train.images[:32]]))
    assert sqnr(model(images), made(images)) > 40
