"""On a GPU (`scripts/gpu_check.sh`): the reference's bits for every method, shape, mask and tile; CUDA graphs;
torch.compile.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import integer_cases as ic  # noqa: E402

import intflash  # noqa: E402
from intflash.backends.reference import BACKEND as REFERENCE  # noqa: E402
from intflash.backends.triton import quantize  # noqa: E402
from intflash.quant import Recipe  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _names(method: str) -> list[str]:
    return [name for name, _ in ic.cases(method, large=True)]


@pytest.mark.parametrize("method, name", [(m, n) for m in (*ic.OURS, *ic.QFLASH_METHODS) for n in _names(m)])
def test_bits(method, name):
    torch.manual_seed(0)
    found = dict(ic.cases(method, large=True))
    assert ic.complaint(found[name], "cuda") is None


@pytest.mark.parametrize("method", ic.OURS)
@pytest.mark.parametrize(
    "rows, keys, warps, stages", [(64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 3), (16, 32, 4, 1)]
)
def test_bits_of_tile_loop_tiles(method, rows, keys, warps, stages):
    from intflash.backends.triton import backend, tile_loop, two_groups
    from intflash.backends.triton.constants import constants_launch

    torch.manual_seed(1)
    steps = backend.STEPS[method]
    if steps.keys not in (None, keys):
        pytest.skip("the keys of a tile are this method's own")
    p = ic.codes(method, nq=300, nk=530, d=64, causal=230)
    there = ic.on_device(p, "cuda")
    launch, constants, _ = constants_launch(there)
    launch.run()
    if method == "intflash_bfp":
        launch, valueless = two_groups.valueless_launch(there)
        launch.run()
        constants = constants._replace(valueless=valueless)
    out = torch.full((1, 2, 300, 64), 99, dtype=torch.int8, device="cuda")
    tile = tile_loop.TileShape(rows, keys, warps, stages)
    tile_loop.tile_loop_launch(there, steps, constants, out, tile_loop.Statistics(None, None), tile).run()
    assert torch.equal(REFERENCE.run(p).out, out.cpu())


def _table_tiles() -> list[tuple]:
    from intflash.backends.triton import tile_sizes

    rows = {n: tuple(t) for n, t in tile_sizes.table()["90"].items() if "row" in n}
    found = {(n, 16 if "p16" in n else 8, "float" in n, t) for n, t in rows.items()}
    more = ((32, 1, 4), (32, 1, 8), (64, 1, 2), (16, 1, 4), (64, 1, 4), (128, 1, 8))  # the last two by warpgroups
    return sorted(found | {(f"row keys{w}", 8, True, t) for t in more for w in (64, 256)})


@pytest.mark.parametrize("name, bits, fused, tile", _table_tiles(), ids=lambda x: str(x))
def test_bits_of_short_rows_tiles(name, bits, fused, tile):
    """Every short-rows tile of the table, on a shape of its class."""
    from intflash.backends.gpu.tensors import view
    from intflash.backends.triton import quantize, short_rows
    from intflash.backends.triton.constants import constants_launch
    from intflash.backends.triton.tile_loop import Statistics

    torch.manual_seed(2)
    n, d = (49, 32) if "keys64" in name else (197, 64)
    method = {16: "intflash", 8: "intflash_p8"}[bits]
    p = (
        ic.floats(method, n, recipe=Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02))
        if fused
        else ic.codes(method, batch=3, nq=n, nk=n, d=d)
    )
    there = ic.on_device(p, "cuda")
    scales, inputs = short_rows.NO_SCALES, None
    if fused:
        inputs = quantize.with_scales(there.q, there.k, there.v, there.recipe).scales
        scales = quantize.Qkv(*map(view, inputs))
    launch, constants, _ = constants_launch(there, inputs)
    launch.run()
    want = REFERENCE.run(p.quantized()).out
    out = torch.full(want.shape, 99, dtype=want.dtype, device="cuda")
    args = there, bits, constants, out, Statistics(None, None), scales, short_rows.RowTile(*tile)
    for _ in range(3):
        short_rows.short_rows_launch(*args).run()
        assert torch.equal(want, out.cpu())


STATIC = Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.03)
OF_TENSORS = Recipe("tensor", "tensor", "tensor")


@pytest.mark.parametrize("recipe", [STATIC, Recipe(), OF_TENSORS], ids=["static", "dynamic", "dynamic of tensors"])
@pytest.mark.parametrize("n", [197, 1024])
@pytest.mark.parametrize("method", ic.OURS)
def test_graph_capture(method, n, recipe, backend):
    """No host synchronization: a graph captures the whole call and replays it on new data, scales included."""
    q, k, v = (torch.randn(2, 3, n, 64, device="cuda", dtype=torch.float16) for _ in range(3))

    def call():
        return intflash.attention(q, k, v, method=method, backend=backend, recipe=recipe, check_finite=False)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for x in (q, k, v):
        x.copy_(torch.randn_like(x) * 1.5)
    graph.replay()
    assert torch.equal(out, call())


@pytest.mark.parametrize("method", ic.OURS)
def test_no_synchronization(method, backend):
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    intflash.attention(q, k, v, method=method, backend=backend, check_finite=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        intflash.attention(q, k, v, method=method, backend=backend, check_finite=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", [Recipe(), OF_TENSORS], ids=["dynamic", "dynamic of tensors"])
def test_torch_compile_fullgraph(recipe, backend):
    q, k, v = (torch.randn(1, 2, 197, 64, device="cuda", dtype=torch.float16) for _ in range(3))

    def call(q, k, v):
        return intflash.attention(q, k, v, backend=backend, recipe=recipe, check_finite=False) * 2

    assert torch.equal(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v))


@pytest.mark.parametrize("method, keys", [("intflash", 65_536), ("intflash_p8", 65_536), ("intflash_bfp", 70_000)])
def test_bits_at_the_largest_number_of_keys(method, keys):
    """As many keys as l and the digit sums hold, and of `intflash_bfp` more, whose sums have 64 bits."""
    p = ic.codes(method, heads=1, nq=3, nk=keys, d=16, amax=1e-6)
    assert ic.complaint(p, "cuda") is None


def test_scales_of_large_tensors():
    """Above 2^22 elements a program takes more of them. The largest value is in the last program, or the first."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 4099, 80, device="cuda").half() for h in (8, 2, 2))
    q[1, 7, 4098, 79], k[0, 0, 0, 0], v[1, 1, 4098, 79] = -300, 200, 100
    scales = quantize.with_scales(q, k, v, OF_TENSORS).scales
    assert [s.item() for s in scales] == (torch.tensor([300.0, 200.0, 100.0]) / 127).tolist()
    scales = quantize.with_scales(q, k, v, Recipe()).scales
    for x, s in zip((q, k, v), scales, strict=True):
        assert torch.equal(s, intflash.quantize(x, "head").scale)
