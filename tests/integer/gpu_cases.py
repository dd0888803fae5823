"""Programs for the GPU executor, whose results must equal the reference's bit for bit.

`python gpu_cases.py` runs them in Triton's interpreter and prints the differences as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path += map(str, (tests, tests / "backends" / "triton"))
    import interpreter  # noqa: F401  sets TRITON_INTERPRET before Triton is imported

import torch

from integer.programs import (
    attention_program,
    integers,
    linear_program,
    norm_program,
    pool_program,
    seeded,
    single,
)
from integer.small_programs import Builder, block
from integer.small_programs import integers as values_of
from intflash.integer import reference
from intflash.integer.gpu import executor
from intflash.integer.program import Input, LayerNorm, Patches, Program

Case = tuple[Program, dict[str, torch.Tensor]]


def _image(g: torch.Generator, program: Program, batch: int = 2) -> dict[str, torch.Tensor]:
    return {"image": integers(g, 0, 255, batch, *program.inputs[0].shape, dtype=torch.uint8)}


def _index(g: torch.Generator, program: Program, batch: int = 2) -> dict[str, torch.Tensor]:
    given = program.inputs[0]
    return {"index": integers(g, 0, given.bound - 1, batch, *given.shape)}


def linears(large: bool) -> Iterator[tuple[str, Case]]:
    g = seeded(0)
    sizes = [(5, 77, 40), (3, 48, 96), (70, 160, 33)]
    if large:
        sizes += [(197, 768, 2304), (49, 3072, 768), (1, 384, 1000), (64, 96, 288), (130, 192, 192), (300, 4096, 64)]
    for m, k, n in sizes:
        for shift in (1, 20, 31, 32, 33, 45, 62):
            # products that land in the range, and ones that saturate everywhere
            top = min((1 << 31) - 1, (1 << shift) // max(1, int(74 * 74 * k**0.5) >> 7))
            for epilogue, bits, out_bits in (
                ("codes", 8, 8), ("codes", 8, 16), ("codes", 8, 24), ("table", 8, 8), ("table", 10, 8),
                ("table", 12, 16), ("residual", 8, 16), ("residual", 8, 24),
            ):  # fmt: skip
                if shift not in (20, 33, 45) and (epilogue, out_bits) not in (("codes", 8), ("residual", 24)):
                    continue
                mapped = epilogue == "residual" and m > 4
                p = linear_program(
                    g, m, k, n, epilogue, bits=bits, out_bits=out_bits, shift=shift, top_multiplier=max(top, 1),
                    symmetric=epilogue == "codes" and shift % 2 == 1, mapped=mapped,
                )  # fmt: skip
                yield f"linear {m} {k} {n} {epilogue} {bits} {out_bits} shift {shift}", (p, _image(g, p))
        p = linear_program(g, m, k, n, "accumulator", top_bias=(1 << 31) - 1 - k * 128 * 127)
        yield f"linear {m} {k} {n} accumulator", (p, _image(g, p))
    for kind in ("uniform", "lowest"):
        b = Builder()
        x = b.codes(values_of(g, (2, 9, 64), 8, kind))
        residual = b.stream(values_of(g, (2, 11, 48), 16, "ends"), 16)
        out = (b.buffer((11, 48), 16),)
        b.linear(
            x, values_of(g, (48, 64), 8).clamp(-127), torch.randint(-999, 999, (48,), generator=g), out,
            epilogue="residual", residual=residual, multiplier=torch.randint(0, 1 << 30, (48,), generator=g), shift=36,
            store_rows=b.tensor(torch.randperm(11, generator=g)[:9], torch.int32),
        )  # fmt: skip
        yield f"residual buffer {kind}", (b.program(*out, residual), b.values)


def two_norms(g: torch.Generator, bits: int, channels: int, mapped: bool) -> Case:
    """Codes and a stream of the same normalized rows."""
    b = Builder()
    x = b.stream(values_of(g, (2, 9, channels), bits), bits)
    load_rows = b.tensor(integers(g, 0, 8, 5, 1), torch.int32) if mapped else None
    outs = []
    for out_bits, shift in ((8, 20), (bits, 9)):
        outs.append(
            b.add(
                LayerNorm, x=x, out=b.buffer((5 if mapped else 9, channels), out_bits), eps=99, shift=shift,
                multiplier=b.tensor(integers(g, 1 - (1 << 31), (1 << 31) - 1, channels), torch.int32),
                bias=b.tensor(integers(g, 1 - (1 << 30), (1 << 30) - 1, channels), torch.int32), load_rows=load_rows,
            )
        )  # fmt: skip
    return b.program(*outs), b.values


def norms(large: bool) -> Iterator[tuple[str, Case]]:
    g = seeded(1)
    for bits, channels, mapped in ((16, 96, True), (24, 40, False), (16, 768, False)):
        if large or channels < 100:
            yield f"two norms {bits} bits {channels}", two_norms(g, bits, channels, mapped)
    for bits in (16, 24):
        for channels in (2, 33, 96) + ((192, 384, 768, 1024, 3072, 1 << 14) if large else ()):
            top = 1 << (bits - 1)
            table = torch.stack([
                *(values_of(g, (channels,), bits, kind) for kind in ("uniform", "ends", "small", "lowest", "highest")),
                torch.zeros(channels, dtype=torch.int64), torch.arange(channels) % 7 - 3 - top // 2,
                -torch.ones(channels, dtype=torch.int64),
            ]).to(torch.int16 if bits == 16 else torch.int32)  # fmt: skip
            for parts, eps, shift, out_bits in (
                (None, 1, 20, 8),
                (1, 1 << 20, 24, 16),
                (4, 1 << 60, 1, 8),
                (2, 9, 9, 24),
            ):
                width = channels * (parts or 1)
                if width > 1 << 14:
                    continue
                rows = None if parts is None else integers(g, 0, 8, 5, parts, dtype=torch.int32)
                p = norm_program(
                    table, 9, bits, multiplier=integers(g, 1 - (1 << 31), (1 << 31) - 1, width, dtype=torch.int32),
                    bias=integers(g, 1 - (1 << 30), (1 << 30) - 1, width, dtype=torch.int32), shift=shift, eps=eps,
                    out_bits=out_bits, load_rows=rows,
                )  # fmt: skip
                yield f"norm {bits} bits {channels} parts {parts}", (p, _index(g, p))


def others(large: bool) -> Iterator[tuple[str, Case]]:
    g = seeded(2)
    for channels in (1, 30, 100):
        table = values_of(g, (20, channels), 16).to(torch.int16)
        for out_bits, shift in ((8, 40), (16, 36), (24, 5)):
            p = pool_program(table, 70, 16, 1, 70, (1 << 31) - 1, shift, out_bits)
            yield f"pool {channels} to {out_bits}", (p, _index(g, p))
    image = torch.randn(2, 3, 12, 20, generator=g)
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 0.5, 1.5, -2.5, 3e38])
    at = torch.rand(image.shape, generator=g) < 0.3
    image[at] = special[torch.randint(0, len(special), (int(at.sum()),), generator=g)]
    for scale, zero in ((1.0, -128), (0.01, 127), (0.37, 5), (1e-30, 0)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            b = Builder()
            b.inputs.append(Input("image", "float", (3, 12, 20)))
            out = b.add(Patches, image="image", out=b.buffer((15, 48), 8), patch=(4, 4), scale=scale, zero_point=zero)
            yield f"patches {scale} {zero} {dtype}", (b.program(out), {"image": image.to(dtype)})
    p = single(
        [Patches("patches", "image", "y", (2, 3))], [Input("image", "uint8", (2, 4, 9))],
        {"y": _codes_buffer(6, 12)}, {}, "y",
    )  # fmt: skip
    yield "patches of bytes", (p, _image(g, p))
    for method in ("intflash", "intflash_p8"):
        for windows, n, d, bias, mask in (
            (1, 17, 16, False, "none"),
            (4, 9, 16, True, "windows"),
            (1, 20, 32, True, "padding"),
        ):
            p = attention_program(g, windows, 3, n, d, method, biased=bias, mask=mask, per_head=windows > 1)
            inputs = _image(g, p)
            if mask == "padding":
                inputs["keep"] = torch.rand(2, n, generator=g) < 0.7
            yield f"attention {method} {windows} {n} {d} {mask}", (p, inputs)
    for method in ("intflash", "intflash_p8"):
        yield f"block {method}", block(g, method=method, windows=2, head_dim=16, bias=True, mask="windows")
    yield "block with a padding mask", block(g, batch=3, head_dim=32, mask="input")
    if large:
        for tokens, method in ((70, "intflash"), (300, "intflash"), (300, "intflash_p8"), (512, "intflash")):
            given = block(g, batch=4, heads=2, tokens=tokens, head_dim=64, mask="input", method=method)
            given[1]["mask"][1], given[1]["mask"][2] = False, torch.arange(tokens) < 9
            yield f"block with a padding mask {tokens} {method}", given
        yield "larger block", block(g, batch=3, heads=4, tokens=197, head_dim=64)
        yield "largest block", block(g, batch=2, heads=12, tokens=197, head_dim=64, method="intflash_p8")


def _codes_buffer(rows: int, columns: int):
    from intflash.integer.program import Buffer

    return Buffer((rows, columns), 8)


def cases(large: bool = False) -> Iterator[tuple[str, Case]]:
    """Named programs and inputs; `large` adds the shapes that the interpreter is too slow for."""
    for make in (linears, norms, others):
        yield from make(large)


def complaint(program: Program, inputs: dict[str, torch.Tensor], device: str = "cpu") -> str:
    """What differs between the GPU executor and the reference, or nothing."""
    from dataclasses import replace

    expected = reference.run(program, {k: x.float() if x.is_floating_point() else x for k, x in inputs.items()})
    there = replace(program, tensors={name: x.to(device) for name, x in program.tensors.items()})
    found = executor.run(there, {name: x.to(device) for name, x in inputs.items()})
    for name, x in expected.items():
        y = found[name].cpu()
        if y.dtype != x.dtype or y.shape != x.shape:
            return f"{name}: {y.dtype} {list(y.shape)}, expected {x.dtype} {list(x.shape)}"
        wrong = (y != x).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            return f"{name}: {len(wrong)} of {x.numel()} differ, first {at}: {int(y[at])}, expected {int(x[at])}"
    return ""


if __name__ == "__main__":
    only = sys.argv[1:]
    wrong = {}
    for name, (program, inputs) in cases():
        if not only or any(part in name for part in only):
            wrong[name] = complaint(program, inputs)
    print(json.dumps(wrong))
