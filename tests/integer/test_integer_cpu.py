"""The native executor of programs: every instruction set and number of threads has the reference's bits."""

import itertools
import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from integer.small_programs import KINDS, Builder, block, integers
from intflash.backends.cpu import instruction_sets
from intflash.integer import IntegerModel, cpu, reference
from intflash.integer.program import Attention, LayerNorm, Patches, Pool

ISAS = instruction_sets()
pytestmark = pytest.mark.skipif(not ISAS, reason="the native module was not built")

sizes = st.one_of(st.integers(1, 40), st.integers(41, 200))


def assert_same_bits(program, inputs, threads=(1,), isas=ISAS):
    expected = reference.run(program, inputs)
    for isa in isas:
        packed = cpu.PackedProgram(program, isa=isa)
        for count in threads:
            found = packed.run(inputs, threads=count)
            for name, value in expected.items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value), f"{name} on {isa} with {count} threads"


def random_linear(pick, g, out_bits):
    """Builder, input and constants of a product, its sums scaled to about the output's range or far from it."""
    b = Builder()
    batch, rows, k, n = pick(st.integers(1, 3)), pick(sizes), pick(sizes), pick(sizes)
    x = b.codes(integers(g, (batch, rows, k), 8, pick(st.sampled_from(KINDS))))
    weight = integers(g, (n, k), 8, pick(st.sampled_from(KINDS))).clamp(-127)
    most = (1 << 31) - 1 - k * 128 * 127
    bias = integers(g, (n,), 32, pick(st.sampled_from(KINDS))).clamp(-most, most)
    if pick(st.booleans()):
        shift = pick(st.integers(1, 62))
        multiplier = (
            integers(g, (n,), 32, pick(st.sampled_from(("uniform", "ends", "highest")))).abs().clamp(max=2**31 - 1)
        )
    else:
        shift = pick(st.integers(31, 44))
        reach = pick(st.floats(0.05, 2)) * 2 ** (out_bits - 1) / (74 * 74 * k**0.5)
        multiplier = (torch.rand(n, generator=g, dtype=torch.float64) * reach * 2.0**shift).round().clamp(max=2**31 - 1)
    return b, batch, rows, n, x, (weight, bias), dict(multiplier=multiplier, shift=shift)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_linear_to_codes(data):
    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    bits = pick(st.sampled_from([8, 8, 16, 24]))
    b, _, rows, n, x, layer, scaled = random_linear(pick, g, bits)
    out = (b.buffer((rows, n), bits),)
    b.linear(x, *layer, out, epilogue="codes", symmetric=pick(st.booleans()), **scaled)
    assert_same_bits(b.program(*out), b.values)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_linear_to_a_table(data):
    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    bits, out_bits = pick(st.sampled_from([8, 10, 12])), pick(st.sampled_from([8, 8, 16]))
    b, _, rows, n, x, layer, scaled = random_linear(pick, g, bits)
    out = (b.buffer((rows, n), out_bits),)
    table = b.tensor(integers(g, (1 << bits,), out_bits), b.buffers[out[0]].dtype)
    b.linear(x, *layer, out, epilogue="table", bits=bits, table=table, **scaled)
    assert_same_bits(b.program(*out), b.values)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_linear_with_a_residual(data):
    """Streams of 16 and 24 bits, constant ones, maps, and residuals that are needed afterwards."""
    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    bits = pick(st.sampled_from([16, 24]))
    b, batch, rows, n, x, layer, scaled = random_linear(pick, g, bits)
    extra = pick(st.integers(0, 3))
    values = integers(g, (batch, rows + extra, n), bits, pick(st.sampled_from(KINDS)))
    out = b.buffer((rows + extra, n), bits)
    outputs = [out]
    if pick(st.booleans()):
        residual = b.tensor(values[0], b.buffers[out].dtype)
    else:
        residual = b.stream(values, bits)
        if pick(st.booleans()):
            outputs.append(residual)
    store = None
    if extra or pick(st.booleans()):
        store = b.tensor(torch.randperm(rows + extra, generator=g)[:rows], torch.int32)
    b.linear(x, *layer, (out,), epilogue="residual", residual=residual, store_rows=store, **scaled)
    assert_same_bits(b.program(*outputs), b.values)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_linear_to_accumulators(data):
    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    b, _, rows, n, x, layer, _ = random_linear(pick, g, 16)
    out = (b.buffer((rows, n), 32),)
    b.linear(x, *layer, out, epilogue="accumulator")
    assert_same_bits(b.program(*out), b.values)


@pytest.mark.parametrize("k", [3072, 12288])
def test_largest_sums(k):
    """Sums at their bounds, and more rows than one block of a thread has."""
    g = torch.Generator().manual_seed(0)
    b = Builder()
    x = b.codes(integers(g, (1, 150, k), 8, "lowest"))
    weight = torch.where(torch.arange(70)[:, None] % 2 == 0, 127, -127).expand(70, k)
    out = (b.buffer((150, 70), 32),)
    most = 2**31 - 1 - k * 128 * 127
    b.linear(x, weight, weight[:, 0] // 127 * -most, out, epilogue="accumulator")
    assert_same_bits(b.program(*out), b.values, threads=(1, 2))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_layer_norm(data):
    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    bits, out_bits = pick(st.sampled_from([8, 16, 16, 24])), pick(st.sampled_from([8, 8, 16, 24]))
    batch, rows, parts = pick(st.integers(1, 2)), pick(st.integers(1, 20)), pick(st.sampled_from([None, 1, 2, 4]))
    channels = pick(st.one_of(st.integers(2, 200), st.integers(201, 4096)))
    b = Builder()
    values = integers(g, (batch, rows, channels), bits, pick(st.sampled_from(KINDS)))
    x = b.codes(values) if bits == 8 else b.stream(values, bits)
    out_rows, width, load_rows = rows, channels, None
    if parts:
        out_rows, width = pick(st.integers(1, 30)), channels * parts
        load_rows = b.tensor(torch.randint(0, rows, (out_rows, parts), generator=g), torch.int32)
    multiplier = integers(g, (width,), 32, pick(st.sampled_from(KINDS))).clamp(min=1 - 2**31)
    out = b.add(
        LayerNorm, x=x, out=b.buffer((out_rows, width), out_bits), load_rows=load_rows,
        multiplier=b.tensor(multiplier, torch.int32),
        bias=b.tensor(integers(g, (width,), 31, pick(st.sampled_from(KINDS))).clamp(1 - 2**30), torch.int32),
        shift=pick(st.integers(1, 24)), eps=pick(st.one_of(st.just(1), st.integers(1, 60).map(lambda n: 1 << n))),
    )  # fmt: skip
    assert_same_bits(b.program(out), b.values)


@pytest.mark.parametrize("bits", [16, 24])
def test_layer_norm_of_most_channels(bits):
    g = torch.Generator().manual_seed(0)
    b = Builder()
    x = b.stream(torch.cat([integers(g, (1, 1, 1 << 14), bits, kind) for kind in KINDS], 1), bits)
    out = b.add(
        LayerNorm, x=x, out=b.buffer((len(KINDS), 1 << 14), 16), shift=1, eps=1,
        multiplier=b.tensor(torch.full((1 << 14,), 2**31 - 1), torch.int32),
        bias=b.tensor(torch.full((1 << 14,), 1 - 2**30), torch.int32),
    )  # fmt: skip
    assert_same_bits(b.program(out), b.values)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_patches_of_floats(data):
    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    ph, pw, rows, columns = (pick(st.integers(1, 5)) for _ in range(4))
    b = Builder()
    shape = (pick(st.integers(1, 3)), ph * rows, pw * columns)
    image = torch.randn(2, *shape, generator=g) * pick(st.sampled_from([0.01, 1.0, 100.0]))
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 0.5, 1.5, -2.5, 3e38])
    at = torch.rand(image.shape, generator=g) < 0.3
    image[at] = special[torch.randint(0, len(special), (int(at.sum()),), generator=g)]
    from intflash.integer.program import Input

    b.inputs.append(Input("image", "float", shape))
    out = b.add(
        Patches, image="image", out=b.buffer((rows * columns, shape[0] * ph * pw), 8), patch=(ph, pw),
        scale=pick(st.sampled_from([1.0, 0.01, 0.37, 1e-30])), zero_point=pick(st.integers(-128, 127)),
    )  # fmt: skip
    assert_same_bits(b.program(out), {"image": image})


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pool(data):
    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    bits, rows, channels = pick(st.sampled_from([8, 16, 24])), pick(st.integers(1, 60)), pick(st.integers(1, 600))
    b = Builder()
    values = integers(g, (2, rows, channels), bits, pick(st.sampled_from(KINDS)))
    x = b.codes(values) if bits == 8 else b.stream(values, bits)
    first = pick(st.integers(0, rows - 1))
    out = b.add(
        Pool, x=x, out=b.buffer((1, channels), pick(st.sampled_from([8, 16, 24]))), first=first,
        stop=pick(st.integers(first + 1, rows)), multiplier=pick(st.integers(0, 2**31 - 1)),
        shift=pick(st.integers(1, 62)),
    )  # fmt: skip
    assert_same_bits(b.program(out), b.values)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_embedding(data):
    from intflash.integer.program import Embedding, Input

    pick = data.draw
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    bits, rows, channels, count = pick(st.sampled_from([16, 24])), pick(sizes), pick(sizes), pick(st.integers(1, 4))
    b, kind = Builder(), pick(st.sampled_from(KINDS))
    out = b.buffer((rows, channels), bits)
    dtype = b.buffers[out].dtype
    indices, tables = [], []
    for i in range(count):
        bound = pick(st.integers(1, 9))
        b.inputs.append(Input(f"i{i}", "index", (rows,), bound=bound))
        b.values[f"i{i}"] = torch.randint(0, bound, (2, rows), generator=g)
        indices.append(f"i{i}")
        tables.append(b.tensor(integers(g, (bound, channels), bits, kind), dtype))
    fixed = b.tensor(integers(g, (rows, channels), bits, kind), dtype) if pick(st.booleans()) else None
    b.add(Embedding, indices=tuple(indices), tables=tuple(tables), out=out, rows=fixed)
    assert_same_bits(b.program(out), b.values)


CASES = [
    dict(method=method, windows=windows, bias=bias, mask=mask)
    for method in ("intflash", "intflash_p8")
    for windows, bias, mask in ((1, False, None), (1, True, "input"), (4, True, "windows"), (3, False, "windows"))
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_a_whole_program(case):
    program, inputs = block(torch.Generator().manual_seed(1), **case)
    assert_same_bits(program, inputs, threads=(1, 2, 5))


def test_a_program_of_many_rows_on_many_threads():
    program, inputs = block(torch.Generator().manual_seed(2), batch=3, heads=4, tokens=70, head_dim=32, windows=3)
    assert_same_bits(program, inputs, threads=(1, 2, 5, 33), isas=ISAS[:1])


def test_images_have_the_same_bits_alone_and_in_a_batch():
    program, inputs = block(torch.Generator().manual_seed(3), batch=7)
    packed = cpu.PackedProgram(program)
    together = packed.run(inputs)
    for i in range(7):
        alone = packed.run({name: x[i : i + 1] for name, x in inputs.items()})
        assert all(torch.equal(alone[name], x[i : i + 1]) for name, x in together.items())


def test_many_callers_at_once():
    program, inputs = block(torch.Generator().manual_seed(4), batch=2, tokens=40, head_dim=32)
    expected = reference.run(program, inputs)
    packed = cpu.PackedProgram(program)
    failures = []

    def call():
        for _ in range(20):
            found = packed.run(inputs, threads=2)
            if not all(torch.equal(found[name], x) for name, x in expected.items()):
                failures.append(found)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def _child(program, inputs, expected, queue):
    found = cpu.run(program, inputs)
    queue.put(all(torch.equal(found[name], x) for name, x in expected.items()))


def test_a_forked_process():
    program, inputs = block(torch.Generator().manual_seed(5), batch=2, tokens=40, head_dim=32)
    expected = cpu.run(program, inputs)  # packs, and starts the pool's threads
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(program, inputs, expected, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and queue.get()


def test_buffers_share_memory_only_where_their_times_do_not_meet():
    program, _ = block(torch.Generator().manual_seed(6), windows=4)
    plan, last = cpu.plan(program), program.last_uses()
    first = {name: i for i, op in enumerate(program.operations) for name in program.writes(op)}
    replaced = {(op.residual, op.out[0]) for op in program.operations if getattr(op, "residual", None) in first}

    def taken(name):
        (offset, column, step), buffer = plan.places[name], program.buffers[name]
        rows = buffer.shape[0] * buffer.shape[2] if len(buffer.shape) == 4 else buffer.shape[0]
        return {offset + column + r * step + i for r in range(rows) for i in range(cpu._row_bytes(buffer))}

    assert replaced and max(max(taken(name)) for name in first) < plan.image_bytes
    for a, b in itertools.combinations(first, 2):
        meet = first[a] <= last[b] and first[b] <= last[a]
        if meet and (a, b) not in replaced:
            assert not taken(a) & taken(b), (a, b)


PEAK = """
import sys, torch
from intflash import integer
from intflash.integer import cpu

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

before = status("VmRSS")
integer.load(sys.argv[1], backend="cpu")(torch.zeros(1, 1, 4, 2048, dtype=torch.uint8))
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, pages are released on Linux")
def test_weights_of_a_file_are_in_memory_once(tmp_path):
    g, b, size, layers = torch.Generator().manual_seed(9), Builder(), 2048, 12
    x = b.codes(integers(g, (1, 4, size), 8))
    for _ in range(layers):
        weight, bias = integers(g, (size, size), 8).clamp(-127), torch.zeros(size)
        out, multiplier = (b.buffer((4, size), 8),), torch.full((size,), 1 << 30)
        (x,) = b.linear(x, weight, bias, out, epilogue="codes", multiplier=multiplier, shift=46)
    file = tmp_path / "model.safetensors"
    IntegerModel(b.program(x)).save(file)
    found = subprocess.run([sys.executable, "-c", PEAK, file], check=True, capture_output=True, text=True)
    assert int(found.stdout) * 1024 < layers * size * size + (24 << 20)


def test_an_empty_batch():
    program, inputs = block(torch.Generator().manual_seed(7))
    found = cpu.run(program, {name: x[:0] for name, x in inputs.items()})
    assert all(len(x) == 0 for x in found.values())


def test_what_is_refused():
    program, _ = block(torch.Generator().manual_seed(8))
    assert cpu.refused(program, torch.device("cpu")) is None
    assert "CPU tensors, got cuda" in cpu.refused(program, torch.device("cuda"))
    attention = next(op for op in program.operations if isinstance(op, Attention))
    b = Builder()
    b.inputs, b.buffers, b.tensors = list(program.inputs), dict(program.buffers), dict(program.tensors)
    b.operations = list(program.operations[: program.operations.index(attention)])
    assert "cannot be outputs" in cpu.refused(b.program(attention.q), torch.device("cpu"))
