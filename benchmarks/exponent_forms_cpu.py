"""AVX-512 instructions per score of the exponent's three candidate forms (docs/numerics.md, section 2).

Compiles one loop per form and width of P with gcc, disassembles it and counts the instructions of the loop
body over the 64 scores it covers. The maximum is not in it (0.0625 per score). Writes
benchmarks/results/machine_code/exponent_forms_cpu.json. Needs gcc and objdump.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

SCORES = 64  # per iteration
FLAGS = "-O3 -march=icelake-server -mprefer-vector-width=512"
ROOT = Path(__file__).resolve().parent.parent

COMMON = r"""
#include <immintrin.h>
#include <stdint.h>
typedef __m512i V;
#define SET16(x) _mm512_set1_epi16((short)(x))
static inline V high_halves(V even, V odd) { return _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB); }
// z = depth in Q.8 plus an offset; p8 has z >> 8 = 6 + s, p16 has z >> 8 = s
static inline V mantissa(V z) {
  return _mm512_ternarylogic_epi32(_mm512_slli_epi16(z, 7), SET16(0x7F80), SET16(0x8000), 0xAE);
}
static inline V p8(V z) {
  V v = mantissa(z), h = _mm512_avg_epu16(_mm512_mulhi_epu16(v, v), SET16(33151));
  return _mm512_avg_epu16(_mm512_srlv_epi16(h, _mm512_srli_epi16(z, 8)), _mm512_setzero_si512());
}
static inline V p16(V z) {
  V v = mantissa(z), w = _mm512_mulhi_epu16(v, v), h = _mm512_avg_epu16(w, SET16(33151)), s = _mm512_srli_epi16(z, 8);
  V n = _mm512_sub_epi16(s, SET16(2));
  __mmask32 alive = _mm512_cmplt_epi16_mask(s, SET16(15));
  V far = _mm512_maskz_avg_epu16(alive, _mm512_srlv_epi16(h, n), _mm512_setzero_si512());
  V near = _mm512_mask_avg_epu16(far, _mm512_movepi16_mask(n), w, SET16(33152));
  return _mm512_mask_add_epi16(near, _mm512_testn_epi16_mask(s, s), near, h);
}
"""

# z of 32 scores from two vectors. OFFSET is 153 for p16 and 153 + 6 * 256 for p8.
FORMS = {
    "a: 64-bit product": r"""
static inline V depth(V s, V top, V c) {
  V d = _mm512_sub_epi32(top, s);
  return high_halves(_mm512_mul_epu32(d, c), _mm512_mul_epu32(_mm512_shuffle_epi32(d, _MM_PERM_DDBB), c));
}
static inline V z_of(V a, V b, V top, V c, __m128i j) {
  return _mm512_avg_epu16(_mm512_packus_epi32(depth(a, top, c), depth(b, top, c)), SET16(2 * (OFFSET)));
}""",
    "b: 16-bit saturated difference": r"""
static inline V z_of(V a, V b, V top, V c, __m128i j) {
  V x = _mm512_srl_epi32(_mm512_sub_epi32(top, a), j), y = _mm512_srl_epi32(_mm512_sub_epi32(top, b), j);
  V d = _mm512_packus_epi32(x, y);
  return _mm512_avg_epu16(_mm512_mulhi_epu16(d, c), SET16(2 * (OFFSET)));
}""",
    "c: 32-bit product S * M + B": r"""
static inline V depth(V s, V top, V c, __m128i j) {
  return _mm512_srl_epi32(_mm512_sub_epi32(top, _mm512_mullo_epi32(s, c)), j);
}
static inline V z_of(V a, V b, V top, V c, __m128i j) {
  return _mm512_avg_epu16(_mm512_packus_epi32(depth(a, top, c, j), depth(b, top, c, j)), SET16(2 * (OFFSET)));
}""",
}

LOOPS = {
    "p8": (
        "(153 + 6 * 256)",
        r"""
V row(const int32_t* s, int64_t n, V top, V c, __m128i j, uint8_t* high, uint8_t* low, V* sums) {
  V sum = _mm512_setzero_si512();
#pragma GCC unroll 1
  for (int64_t i = 0; i < n; i += 64) {
    const V x = z_of(_mm512_load_si512(s + i), _mm512_load_si512(s + i + 16), top, c, j);
    const V y = z_of(_mm512_load_si512(s + i + 32), _mm512_load_si512(s + i + 48), top, c, j);
    const V p = _mm512_packus_epi16(p8(x), p8(y));
    _mm512_store_si512(high + i, p);
    sum = _mm512_dpbusd_epi32(sum, p, _mm512_set1_epi8(1));
  }
  return sum;
}""",
    ),
    "p16": (
        "153",
        r"""
V row(const int32_t* s, int64_t n, V top, V c, __m128i j, uint8_t* high, uint8_t* low, V* sums) {
  V sum = _mm512_setzero_si512(), sum_low = sum;
#pragma GCC unroll 1
  for (int64_t i = 0; i < n; i += 64) {
    const V x = p16(z_of(_mm512_load_si512(s + i), _mm512_load_si512(s + i + 16), top, c, j));
    const V y = p16(z_of(_mm512_load_si512(s + i + 32), _mm512_load_si512(s + i + 48), top, c, j));
    const V h = _mm512_packus_epi16(_mm512_srli_epi16(x, 8), _mm512_srli_epi16(y, 8));
    const V l = _mm512_packus_epi16(_mm512_and_si512(x, SET16(255)), _mm512_and_si512(y, SET16(255)));
    _mm512_store_si512(high + i, h);
    _mm512_store_si512(low + i, l);
    sum = _mm512_dpbusd_epi32(sum, h, _mm512_set1_epi8(1));
    sum_low = _mm512_dpbusd_epi32(sum_low, l, _mm512_set1_epi8(1));
  }
  *sums = sum_low;
  return sum;
}""",
    ),
}


def loop_body(assembly: str) -> list[str]:
    """Returns the mnemonics between the target of the function's backward jump and the jump."""
    lines = re.findall(r"^\s*([0-9a-f]+):\s+(\S+)\s*([^\n]*)$", assembly, re.M)
    for address, mnemonic, operands in lines:
        target = re.match(r"([0-9a-f]+)", operands)
        if mnemonic.startswith("j") and target and int(target[1], 16) < int(address, 16):
            first, last = int(target[1], 16), int(address, 16)
            return [m for a, m, _ in lines if first <= int(a, 16) <= last]
    raise RuntimeError("no loop found")


def count(form: str, loop: str, offset: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "form.c"), Path(folder, "form.o")
        source.write_text(f"#define OFFSET {offset}\n{COMMON}{form}{loop}")
        subprocess.run(["gcc", *FLAGS.split(), "-c", source, "-o", binary], check=True)
        disassembly = ["objdump", "-d", "--no-show-raw-insn", binary]
        body = loop_body(subprocess.run(disassembly, capture_output=True, text=True, check=True).stdout)
    vector = [m for m in body if m.startswith(("v", "k"))]
    return {
        "instructions": len(body) / SCORES,
        "vector_instructions": len(vector) / SCORES,
        "multiplies": sum(m.startswith(("vpmul", "vpdp")) for m in vector) / SCORES,
    }


def main() -> None:
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    table = {
        form: {p: count(source, loop, offset) for p, (offset, loop) in LOOPS.items()} for form, source in FORMS.items()
    }
    result = {"unit": "per score, without the maximum", "compiler": compiler, "flags": FLAGS, "forms": table}
    path = ROOT / "benchmarks/results/machine_code/exponent_forms_cpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for form, widths in table.items():
        for p, numbers in widths.items():
            print(f"{form:34} {p:4}", {name: round(value, 3) for name, value in numbers.items()})


if __name__ == "__main__":
    main()
