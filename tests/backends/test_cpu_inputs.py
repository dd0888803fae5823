"""The native CPU backend's way to a caller's tensors: reading, quantization, memory layouts."""

import pytest
import torch
from cpu_problems import CASES, ISAS, METHODS, assert_same_bits, name_of, problem_of

import intflash
from intflash import Recipe
from intflash.backends import cpu, reference
from intflash.call import prepare

pytestmark = pytest.mark.skipif(not ISAS, reason="the native module was not built")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tensor", "head", "static", "static tensor", "static heads"])
def test_native_quantization_has_the_library_s_codes(isa, dtype, kind):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 77, 40, generator=g).to(dtype) for _ in range(3))
    v[1] = 2.0**-24 if dtype == torch.float16 else 2.0**-110  # float16's smallest, or an amax that counts as 0
    q[0, 0, :, :7] = 0.5 * q.abs().amax() / 127 * torch.arange(77)[:, None].to(dtype)  # ties
    numbers = dict(q_scale=0.01, k_scale=0.02, v_scale=0.03)
    heads = torch.tensor([0.01, 0.5, 0.2])
    recipe = {
        "static": Recipe(**numbers),
        "static tensor": Recipe(**{name: torch.tensor(x) for name, x in numbers.items()}),
        "static heads": Recipe(*["head"] * 3, q_scale=heads, k_scale=heads[None, :, None, None], v_scale=heads),
    }.get(kind) or Recipe(kind, kind, kind)
    problem = prepare(q, k, v, recipe=recipe)[0]
    assert cpu._scales(problem) is not None
    for threads in (1, 2):
        assert_same_bits(cpu.run(problem, isa=isa, threads=threads), reference.BACKEND.run(problem))


@pytest.fixture
def without_functions():
    cpu.use_native(cpu._native, find_torch=False)
    yield
    cpu.use_native(cpu._native)


@pytest.mark.parametrize("case", CASES[::6], ids=name_of)
def test_tensors_read_by_their_methods(case, without_functions):
    """As with a torch whose C functions are not found."""
    problem = problem_of(case)
    assert_same_bits(cpu.run(problem), reference.BACKEND.run(problem))


def test_scales_read_by_their_methods(without_functions):
    x, heads = torch.randn(2, 3, 77, 40), torch.tensor([0.01, 0.5, 0.2])
    recipe = Recipe(
        "head", "tensor", "head", q_scale=heads, k_scale=torch.tensor([[0.02]]), v_scale=heads[None, :, None, None]
    )
    problem = prepare(x, x, x, recipe=recipe)[0]
    assert cpu._scales(problem) is not None
    assert_same_bits(cpu.run(problem), reference.BACKEND.run(problem))
    empty = intflash.quantize(x)
    empty.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory of its own"):
        intflash.attention(empty, empty, empty, backend="cpu", out_scale="bound")


def test_parameters():
    x = torch.nn.Parameter(torch.randn(1, 2, 20, 16))
    with torch.no_grad():
        assert torch.equal(intflash.attention(x, x, x, backend="cpu"), intflash.attention(x, x, x, backend="reference"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3, 32), (50, 5, 32), (33, 2, 100)])
def test_quantization_in_memory_s_order(isa, dtype, shape):
    """A token's heads side by side, apart from one another, of one batch only; the largest value anywhere."""
    tokens, heads, d = shape
    g = torch.Generator().manual_seed(tokens)
    packed = torch.randn(2, tokens, 3, heads, d, generator=g).to(dtype)
    packed[1, -1, :, -1, -1] = torch.tensor([-9, 11, -13]).to(dtype)
    for qkv in (packed, packed[:1], packed[..., : d // 2]):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        for recipe in (Recipe(), Recipe(q_scale=0.05, k="head", v_scale=torch.tensor(0.1))):
            problem = prepare(q, k, v, recipe=recipe)[0]
            assert cpu._scales(problem) is not None
            expected = reference.BACKEND.run(problem)
            for threads in (1, 2):
                assert_same_bits(cpu.run(problem, isa=isa, threads=threads), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_output_has_the_layout_of_q(method, dtype):
    """Tokens before heads in memory, as a model's next layer wants them; the same values."""
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 53, 3, 4, 32, generator=g).permute(2, 0, 3, 1, 4)
    for tensors in (qkv.unbind(0), qkv.contiguous().unbind(0)):
        out_scale = "bound" if dtype == torch.int8 else None
        problem = prepare(*tensors, method=method, out_dtype=dtype, out_scale=out_scale)[0]
        result = cpu.run(problem)
        assert_same_bits(result, reference.BACKEND.run(problem))
        if problem.method not in cpu.FLASH and dtype.is_floating_point:
            assert result.out.stride(1) < result.out.stride(2) or tensors[0].stride(1) > tensors[0].stride(2)


@pytest.mark.parametrize("method", ["intflash", "qflash"])
@pytest.mark.parametrize("layout", ["channels last", "expanded", "transposed"])
def test_integer_output_of_any_layout(method, layout):
    x = torch.randn(2, 6, 14, 16)
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.mT.contiguous().mT
    else:
        x = x[:1, :1].expand(2, 6, 14, 16)
    codes = intflash.quantize(x)
    for inputs in ([x] * 3, [codes] * 3):
        options = dict(method=method, out_dtype=torch.int8, out_scale="bound")
        found = intflash.attention(*inputs, backend="cpu", **options)
        assert torch.equal(found.data, intflash.attention(*inputs, backend="reference", **options).data)
