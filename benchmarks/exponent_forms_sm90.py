"""Machine instructions per score of the exponent's candidate forms on sm_90.

Writes benchmarks/results/machine_code/exponent_forms_sm90.json.

Each form turns 64 int32 scores a thread into packed 8-bit p with an int32 row constant, in inline PTX of four scores;
a kernel that only packs the top bytes (0.75 PRMT a score) is subtracted. Compiled with Triton, no GPU needed.
"""

from __future__ import annotations

import json
import pathlib
from collections import Counter

import torch
import triton
import triton.language as tl

from benchmarks import sass
from intflash.backends.triton.launch import TritonLaunch

OUT = pathlib.Path(__file__).parent / "results" / "machine_code" / "exponent_forms_sm90.json"
SHIFT = "add.u32 u, u, 256; mad.lo.u32 m, u, u, 132608; shl.b32 h, 1, h; mad.lo.u32 t{i}, m, h, 0x80800000;"
PACK = "prmt.b32 a, t0, t1, 0x0073; prmt.b32 b, t2, t3, 0x0073; prmt.b32 $0, a, b, 0x5410;}"
ALU = ("SHF", "LEA", "LOP3", "PRMT", "IADD3", "VIADD", "VIMNMX", "VIMNMX3", "SEL", "ISETP", "I2IP", "SGXT", "BFE")

# $S score, $C multiplier, $B 64-bit row constant (its low word where 32 bits are enough).
FORMS = {
    "pack only": "mov.b32 t{i}, $S;",
    "(a) 64-bit product, mad.lo.cc and madc.hi": "mov.b64 {{bl, bh}}, $B; mad.lo.cc.s32 lo, $S, $C, bl; "
    "madc.hi.s32 h, $S, $C, bh; shr.u32 u, lo, 24; " + SHIFT,
    "(a) 64-bit product, mad.wide": "mad.wide.s32 w, $S, $C, $B; mov.b64 {{lo, h}}, w; shr.u32 u, lo, 24; " + SHIFT,
    "(b) 16-bit depth, Q5.27": "mov.b64 {{bl, bh}}, $B; sub.s32 u, bl, $S; shr.u32 u, u, 2; min.u32 u, u, 65535; "
    "mul.lo.u32 u, u, $C; sub.u32 lo, bh, u; shr.s32 h, lo, 27; bfe.u32 u, lo, 19, 8; " + SHIFT,
    "(c) 32-bit product, F = 20": "mov.b64 {{bl, bh}}, $B; mad.lo.s32 lo, $S, $C, bl; shr.s32 h, lo, 20; "
    "bfe.u32 u, lo, 12, 8; " + SHIFT,
}  # fmt: skip


def ptx(form: str) -> str:
    text = "{.reg .u32 h, lo, u, m, bl, bh, t0, t1, t2, t3, a, b; .reg .b64 w;\n"
    for i in range(4):
        text += form.format(i=i).replace("$S", f"${1 + i}").replace("$C", f"${5 + i}").replace("$B", f"${9 + i}") + "\n"
    return text + PACK


@triton.jit
def _form_kernel(s_ptr, c_ptr, b_ptr, p_ptr, ASM: tl.constexpr):
    rows, keys = tl.arange(0, 32), tl.arange(0, 256)
    at = rows[:, None] * 256 + keys[None, :]
    s, c = tl.load(s_ptr + at), tl.load(c_ptr)
    b = tl.load(b_ptr + rows)[:, None]
    s, c = tl.broadcast(s, c)
    s, b = tl.broadcast(s, b)
    p = tl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r,r,r,r,l,l,l,l", [s, c, b], dtype=tl.int8, is_pure=True, pack=4)
    tl.store(p_ptr + at, p)


def count(form: str) -> Counter[str]:
    tensors = dict(
        s_ptr=torch.zeros(1, dtype=torch.int32), c_ptr=torch.zeros(1, dtype=torch.int32),
        b_ptr=torch.zeros(1, dtype=torch.int64), p_ptr=torch.zeros(1, dtype=torch.int8),
    )  # fmt: skip
    machine = sass.compile_launch(TritonLaunch(_form_kernel, (1,), tensors | dict(ASM=ptx(form)), 4, 1), 90)
    found = Counter("IMAD.WIDE" if i.text.startswith("IMAD.WIDE") else i.opcode for i in machine.instructions)
    found.pop("NOP", None)
    return found


def main() -> None:
    scores = 32 * 256 / 128
    rows, base = [], None
    for name, form in FORMS.items():
        found = count(form)
        base = base or found
        more = {o: (found[o] - base[o]) / scores for o in {*found, *base} if abs(found[o] - base[o]) >= 2}
        fma = sum(v * (2 if o == "IMAD.WIDE" else 1) for o, v in more.items() if o.startswith("IMAD"))
        rows.append(
            dict(
                form=name, alu=round(sum(v for o, v in more.items() if o in ALU), 2), fma_slots=round(fma, 2),
                opcodes={o: round(v, 2) for o, v in sorted(more.items(), key=lambda x: -x[1])},
            )
        )  # fmt: skip
    note = "per score over a kernel that packs top bytes (0.75 PRMT)"
    OUT.write_text(json.dumps(dict(arch=90, triton=triton.__version__, counts=note, forms=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
