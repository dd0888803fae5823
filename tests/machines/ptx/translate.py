"""Translates a PTX kernel to C++ for machine.hpp: one statement for each instruction, with a thread's registers in a
struct.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ptx import Instruction, Kernel, Label

_BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # of unsigned words
# the opposite comparison, which fails for a NaN
_OR_UNORDERED = {"leu": ">", "ltu": ">=", "geu": "<", "gtu": "<=", "neu": "=="}
_NUMBERS = ("f32", "f64", "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_TYPES = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_NOTHING = {
    "griddepcontrol.launch_dependents", "fence.proxy.async.shared.cta", "prefetch.global.L2",
    "wgmma.fence.sync.aligned", "membar.gl", "fence.acq_rel.gpu",
    "createpolicy.fractional.L2.evict_first.b64", "createpolicy.fractional.L2.evict_last.b64",
}  # fmt: skip


class Untranslated(ValueError):
    """An instruction without a translation."""


def _c_type(name: str) -> str:
    return _TYPES.get(name, name)


def cpp(kernel: Kernel) -> str:
    """Returns a source file that includes machine.hpp.

    Raises:
        Untranslated: an instruction is not known.
    """
    names = {name: re.sub(r"\W", "_", name) for name in kernel.registers}
    declared = "\n".join(f"  {_c_type(kind)} {names[name]};" for name, kind in kernel.registers.items())
    body = []
    for s in kernel.statements:
        if isinstance(s, Label):
            body.append(f"{_label(s.name)}:;")
            continue
        text = _Translator(kernel, names, s).text()
        if s.predicate:
            text = f"if ({'!' * (s.predicate[0] == '!')}g.{names[s.predicate.lstrip('!')]}) {{ {text} }}"
        body.append(text)
    lines = "\n".join(f"  {line}" for line in body)
    return _FILE.format(registers=declared, statements=lines)


_FILE = """// Made by translate.py.
#include "types.hpp"
struct Registers {{
{registers}
}};
#include "machine.hpp"
__attribute__((optimize("O0"))) static void kernel() {{
  Registers& g = self->registers;
  [[maybe_unused]] u64 carry = 0;
{statements}
}}
"""


def _label(name: str) -> str:
    return re.sub(r"\W", "_", name)


class _Translator:
    """Translates one instruction. The methods are named after the first part of the opcode."""

    def __init__(self, kernel: Kernel, names: dict[str, str], instruction: Instruction):
        self.kernel, self.names, self.s = kernel, names, instruction
        self.parts, self.kind = instruction.opcode[1:], _c_type(instruction.opcode[-1])

    def text(self) -> str:
        method: Callable[[], str] | None = getattr(self, "_" + self.s.opcode[0], None)
        found = "" if ".".join(self.s.opcode) in _NOTHING else method and method()
        if found is None:
            raise Untranslated(f"line {self.s.line}: {'.'.join(self.s.opcode)} {self.s.operands}")
        return found

    # Operands.

    def get(self, at: int | str, kind: str | None = None) -> str:
        """Returns a C++ expression of a type."""
        x, kind = self.s.operands[at] if isinstance(at, int) else at, kind or self.kind
        if x in self.names:
            return f"as<{kind}>(g.{self.names[x]})"
        if found := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", x):
            return f"as<{kind}>(u32(0x{found[1]}))"
        if found := re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", x):
            return f"as<{kind}>(u64(0x{found[1]}))"
        if x in self.kernel.shared:
            return f"{kind}(kSharedBase + {self.kernel.shared[x]})"
        if x in self.kernel.parameters:
            return f"reinterpret_cast<u64>(parameters[{list(self.kernel.parameters).index(x)}])"
        if found := re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.([xyz])", x):
            axis = "xyz".index(found[2])
            one = {"tid": "self->tid", "ntid": "block->threads"} if axis == 0 else {"tid": "0", "ntid": "1"}
            values = one | {"ctaid": f"block->index[{axis}]", "nctaid": f"block->grid[{axis}]"}
            return f"{kind}({values[found[1]]})"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", x):
            return f"{kind}({x.rstrip('U')}ll)"
        raise Untranslated(f"line {self.s.line}: operand {x}")

    def put(self, value: str, at: int | str = 0) -> str:
        to = self.s.operands[at] if isinstance(at, int) else at
        return f"put(g.{self.names[to]}, {value});"

    def address(self, at: int, kind: str) -> str:
        base, _, offset = self.s.operands[at][1:-1].partition("+")
        return f"{self.get(base.strip(), kind)} + {kind}({offset or 0})"

    def each(self, at: int) -> tuple[str, ...]:
        x = self.s.operands[at]
        return x if isinstance(x, tuple) else (x,)

    def words(self, at: int) -> str:
        return "{" + ", ".join(self.get(x, "u32") for x in self.each(at)) + "}"

    # Arithmetic.

    def _binary(self) -> str | None:
        sign = _BINARY[self.s.opcode[0]]
        if self.parts[0] not in ("f32", "f64", "rn", self.s.opcode[-1]):  # with a carry, saturated
            return None
        return self.put(f"{self.kind}({self.get(1)} {sign} {self.get(2)})")

    _add = _sub = _and = _or = _xor = _binary

    def _minmax(self) -> str | None:
        name, kind = self.s.opcode[0], self.parts[-1]
        if kind.endswith("x2"):
            of = {"f16x2": "f16_to, f16_of", "bf16x2": "bf16_to, bf16_of"}.get(kind)
            nan_wins = "true" if self.parts[0] == "NaN" else "false"
            both = f"max_halves<{of}, {nan_wins}>({self.get(1, 'u32')}, {self.get(2, 'u32')})"
            return self.put(both) if name == "max" and of else None
        return self.put(f"std::{'f' if kind[0] == 'f' else ''}{name}({self.get(1)}, {self.get(2)})")

    _min = _max = _minmax

    def _not(self) -> str:
        return self.put(f"{'!' if self.kind == 'pred' else '~'}{self.get(1)}")

    def _neg(self) -> str:
        return self.put(f"-{self.get(1)}")

    def _abs(self) -> str:
        if self.parts[-1] in ("f16x2", "bf16x2"):
            return self.put(f"{self.get(1, 'u32')} & 0x7FFF7FFFu")
        return self.put(f"std::abs({self.get(1)})")

    def _product(self) -> str | None:
        if self.parts[0] == "wide":
            return f"{_WIDE[self.kind]}({self.get(1)}) * {_WIDE[self.kind]}({self.get(2)})"
        if self.parts[0] == "hi" and self.kind in _WIDE:
            wide = _WIDE[self.kind]
            return f"{self.kind}({wide}({self.get(1)}) * {wide}({self.get(2)}) >> 32)"
        if self.parts[0] == "hi":
            wide = {"s64": "s128", "u64": "u128"}[self.kind]
            return f"{self.kind}({wide}({self.get(1)}) * {wide}({self.get(2)}) >> 64)"
        return f"{self.get(1)} * {self.get(2)}" if self.parts[0] in ("lo", "f32", "f64", "rn") else None

    def _mul(self) -> str | None:
        return self._product() and self.put(self._product())

    def _mad(self) -> str | None:
        if self.parts[1:2] == ("cc",):  # a pair with madc.hi: the sum's low word, and its carry
            total = f"u64(u32({self.get(1)} * {self.get(2)})) + {self.get(3, 'u32')}"
            return f"carry = ({total}) >> 32; " + self.put(f"u32({total})")
        wide = _WIDE[self.kind] if self.parts[0] == "wide" else None
        return self._product() and self.put(f"{self._product()} + {self.get(3, wide)}")

    def _madc(self) -> str | None:
        product = f"u64(s64({self.get(1)}) * s64({self.get(2)}))"
        return self.put(f"u32({product} >> 32) + {self.get(3, 'u32')} + carry") if self.parts == ("hi", "s32") else None

    def _fma(self) -> str | None:
        return self.put(f"std::fma({self.get(1)}, {self.get(2)}, {self.get(3)})") if self.parts[0] == "rn" else None

    def _div(self) -> str | None:
        return self.put(f"{self.get(1)} / {self.get(2)}") if self.parts[0] in ("rn", "u32", "s32") else None

    def _rem(self) -> str | None:
        return self.put(f"{self.get(1)} % {self.get(2)}") if self.kind in ("u32", "s32") else None

    def _rcp(self) -> str | None:
        return self.put(f"{self.kind}(1) / {self.get(1)}") if self.parts[0] == "rn" else None

    def _shl(self) -> str:
        return self.put(f"shift_left({self.get(1)}, {self.get(2, 'u32')})")

    def _shr(self) -> str:
        return self.put(f"shift_right({self.get(1)}, {self.get(2, 'u32')})")

    def _clz(self) -> str | None:
        return self.put(f"clz({self.get(1)})") if self.kind in ("u32", "u64") else None

    def _brev(self) -> str | None:
        return self.put(f"reversed_bits({self.get(1)})") if self.kind == "u32" else None

    def _bfind(self) -> str | None:
        if self.parts != ("shiftamt", "u32"):
            return None
        return self.put(f"{self.get(1)} ? clz({self.get(1)}) : ~0u")

    def _bfi(self) -> str:
        return self.put(f"bfi({self.get(1)}, {self.get(2)}, {self.get(3, 'u32')}, {self.get(4, 'u32')})")

    def _prmt(self) -> str:
        return self.put(f"prmt({', '.join(self.get(i, 'u32') for i in (1, 2, 3))})")

    def _dp4a(self) -> str:
        a, b = (f"{kind[0]}8" for kind in self.parts)
        return self.put(f"dp4a<{a}, {b}>({', '.join(self.get(i, 'u32') for i in (1, 2, 3))})")

    def _setp(self) -> str | None:
        compare = self.parts[0]
        if len(self.parts) > 2:  # combined with a third operand
            return None
        if compare in _OR_UNORDERED:
            return self.put(f"!({self.get(1)} {_OR_UNORDERED[compare]} {self.get(2)})")
        return self.put(f"{self.get(1)} {_COMPARE[compare]} {self.get(2)}") if compare in _COMPARE else None

    def _selp(self) -> str:
        return self.put(f"{self.get(3, 'pred')} ? {self.get(1)} : {self.get(2)}")

    def _cvt(self) -> str | None:
        if self.parts[:2] == ("pack", "sat") and self.parts[2] in ("s8", "u8") and self.parts[3:] == ("s32", "b32"):
            numbers = self.get(1, "s32"), self.get(2, "s32"), self.get(3, "u32")
            return self.put(f"pack_sat<{self.parts[2]}>({', '.join(numbers)})")
        if self.parts == ("pack", "sat", "s16", "s32"):
            return self.put(f"pack_sat_halves({self.get(1, 's32')}, {self.get(2, 's32')})")
        rounding, to, source = ("", *self.parts)[-3:]
        if to in ("f16x2", "bf16x2") and rounding == "rn":
            return self.put(f"{to[:-2]}_of({self.get(1, 'f32')}) << 16 | {to[:-2]}_of({self.get(2, 'f32')})")
        if to == "f16" and rounding == "rn":
            return self.put(f"u16(f16_of({self.get(1, 'f32')}))")
        if source == "f16" and to == "f32":
            return self.put(f"f16_to({self.get(1, 'u16')})")
        if to[0] in "us" and source[0] == "f":
            return self.put(f"{to}(std::nearbyint({self.get(1, source)}))") if rounding == "rni" else None
        if rounding in ("", "rn") and to in _NUMBERS and source in _NUMBERS:
            return self.put(f"{to}({self.get(1, source)})")
        return None

    # Moves.

    def _mov(self) -> str:
        to, source = self.s.operands
        if isinstance(to, tuple):
            bits = 64 // len(to) if self.kind == "u64" else 16
            return " ".join(self.put(f"u{bits}({self.get(1)} >> {bits * i})", x) for i, x in enumerate(to))
        if isinstance(source, tuple):
            bits = {"u64": 64, "u32": 32}[self.kind] // len(source)
            return self.put(
                " | ".join(f"{self.kind}({self.get(x, f'u{bits}')}) << {bits * i}" for i, x in enumerate(source))
            )
        return self.put(self.get(1))

    def _cvta(self) -> str | None:
        kind = ".".join(self.parts)
        if kind in ("param.u64", "to.global.u64", "global.u64"):
            return self.put(self.get(1, "u64"))
        functions = {"shared.u64": "generic_of_shared", "to.shared.u64": "shared_of_generic"}
        return self.put(f"{functions[kind]}({self.get(1, 'u64')})") if kind in functions else None

    def _memory(self, at: int, count: int, reads: bool = False) -> str:
        """Returns the host's address of `count` elements. reads: they are only read."""
        space = next((x for x in ("param", "global", "cluster", "shared") if x in self.parts), "generic")
        if space == "param":
            return f"reinterpret_cast<const u8*>({self.address(at, 'u64')})"
        if space == "global" and "nc" in self.parts:
            space = "constant"
        elif space == "global" and reads:
            space = "source"
        pointer = "u32" if space in ("shared", "cluster") else "u64"
        size = f"{count} * sizeof({self.kind})"
        return f"{space}_at({self.address(at, pointer)}, {size}, {self.s.line}, {size})"

    def _ld(self) -> str:
        to = self.each(0)
        loads = " ".join(self.put(f"read<{self.kind}>(at + {i} * sizeof({self.kind}))", x) for i, x in enumerate(to))
        return f"{{ const u8* at = {self._memory(1, len(to), reads=True)}; {loads} }}"

    def _st(self) -> str:
        source, size = self.each(1), f"sizeof({self.kind})"
        stores = " ".join(f"write<{self.kind}>(at + {i} * {size}, {self.get(x)});" for i, x in enumerate(source))
        return f"{{ u8* at = {self._memory(0, len(source))}; {stores} }}"

    def _atom(self) -> str | None:
        """Blocks run one after another, so that an atomic operation is a load and a store."""
        results = {"max": "std::max", "add": "std::plus<>()"}
        name = self.parts[-2]
        if name not in results:
            return None
        result = f"{results[name]}(read<{self.kind}>(at), {self.get(2)})"
        stores = f"write<{self.kind}>(at, now);"
        before = self.put(f"read<{self.kind}>(at)")
        return f"{{ u8* at = {self._memory(1, 1)}; const {self.kind} now = {result}; {before} {stores} }}"

    def _cp(self) -> str | None:
        kind = ".".join(self.parts[:2])
        if kind == "async.commit_group":
            return "self->copies.commit();"
        if kind == "async.wait_group":
            return f"copies_wait({self.get(0, 'u32')}, {self.s.line});"
        if kind == "async.wait_all":
            return f"copies_wait_all({self.s.line});"
        if kind == "async.bulk" and self.parts[2:4] == ("tensor", "5d"):
            source, at = re.fullmatch(r"\[(.*?),\s*\{(.*)\}\]", self.s.operands[1]).groups()
            ats = ", ".join(self.get(x.strip(), "s32") for x in at.split(","))
            map_ = f"reinterpret_cast<const u64*>({self.get(source, 'u64')})"
            copy = f"{{{self.address(0, 'u32')}, 0, 0, nullptr, {map_}, {{{ats}}}}}"
            return f"transfer({self.address(2, 'u32')}, {self.s.line}).copies.push_back({copy});"
        if self.parts[:3] in (("async", "cg", "shared"), ("async", "ca", "shared")):
            has_size = len(self.s.operands) - ("cache_hint" in self.parts) > 3
            present = self.get(3 if has_size else 2, "u32")
            source = f"reinterpret_cast<const u8*>({self.address(1, 'u64')})"
            copy = f"{{{self.address(0, 'u32')}, {self.get(2, 'u32')}, {present}, {source}, nullptr, {{}}}}"
            return f"issue({copy}, {self.s.line});"
        return None

    # Control flow, and what threads do together.

    def _bra(self) -> str:
        return f"goto {_label(self.s.operands[0])};"

    def _ret(self) -> str:
        return "return;"

    def _bar(self) -> str:
        if self.parts[0] == "warp":
            return "meet(block->warps[self->tid / 32].barrier, 32);"
        if self.parts == ("red", "or", "pred"):
            barrier = f"block->barriers[{self.get(1, 'u32')}]"
            return self.put(f"meet_any({barrier}, block->threads, {self.get(2)})")
        count = self.get(1, "u32") if len(self.s.operands) > 1 else "block->threads"
        return f"meet(block->barriers[{self.get(0, 'u32')}], {count});"

    def _barrier(self) -> str | None:
        steps = {("cluster", "arrive"): "cluster_arrive();", ("cluster", "wait"): "cluster_wait();"}
        return steps.get(self.parts[:2])

    def _mapa(self) -> str:
        return self.put(f"shared_of_block({self.get(1, 'u32')}, {self.get(2, 'u32')}, {self.s.line})")

    def _griddepcontrol(self) -> str | None:
        return "block->previous_done = true;" if self.parts == ("wait",) else None

    def _setmaxnreg(self) -> str:
        return ""

    def _mbarrier(self) -> str | None:
        line = self.s.line
        if self.parts[0] == "init":
            return f"transfer_init({self.address(0, 'u32')}, {self.get(1, 'u32')}, {line});"
        if self.parts[0] == "arrive":
            number = self.get(2, "u32") if len(self.s.operands) > 2 else "1"
            bytes_, arrivals = (number, "1") if "expect_tx" in self.parts else ("0", number)
            return f"transfer_arrive({self.address(1, 'u32')}, {bytes_}, {arrivals}, {line});"
        if self.parts[:2] in (("try_wait", "parity"), ("test_wait", "parity")):
            waits = str(self.parts[0] == "try_wait").lower()
            return self.put(f"transfer_done({self.address(1, 'u32')}, {self.get(2, 'u32')}, {waits}, {line})")
        return None

    def _shfl(self) -> str | None:
        if self.parts[1] not in ("bfly", "idx"):
            return None
        to, _, valid = self.s.operands[0].partition("|")
        by_xor = str(self.parts[1] == "bfly").lower()
        call = f"shuffle({by_xor}, {', '.join(self.get(i, 'u32') for i in (1, 2, 3))}, valid)"
        also = f" g.{self.names[valid]} = valid;" if valid else ""
        return f"{{ bool valid; {self.put(call, to)}{also} }}"

    def _vote(self) -> str | None:
        if self.parts[1] == "ballot":
            return self.put(f"ballot({self.get(1, 'pred')})")
        if self.parts[1] not in ("all", "any"):
            return None
        return self.put(f"vote({str(self.parts[1] == 'all').lower()}, {self.get(1, 'pred')})")

    def _redux(self) -> str | None:
        results = {"add": "a + b", "max": "a > b ? a : b", "min": "a < b ? a : b", "or": "a | b"}
        if self.parts[1] not in results:
            return None
        operation = f"[]({self.kind} a, {self.kind} b) {{ return {results[self.parts[1]]}; }}"
        return self.put(f"warp_reduce({self.get(1)}, {operation})")

    def _ldmatrix(self) -> str | None:
        if "x4" not in self.parts:
            return None
        stores = " ".join(self.put(f"x[{i}]", x) for i, x in enumerate(self.each(0)))
        load = f"load_matrices<{str('trans' in self.parts).lower()}>"
        return f"{{ u32 x[4]; {load}(x, {self.address(1, 'u32')}, {self.s.line}); {stores} }}"

    def _stmatrix(self) -> str | None:
        if "trans" in self.parts or "x4" not in self.parts:
            return None
        return f"{{ const u32 x[4] = {self.words(1)}; store_matrices(x, {self.address(0, 'u32')}, {self.s.line}); }}"

    def _mma(self) -> str | None:
        if self.parts[2] != "m16n8k32":
            return None
        stores = " ".join(self.put(f"d[{i}]", x) for i, x in enumerate(self.each(0)))
        operands = f"const u32 a[4] = {self.words(1)}, b[2] = {self.words(2)}, c[4] = {self.words(3)}; u32 d[4];"
        return f"{{ {operands} warp_product<{self.parts[6]}, {self.parts[7]}>(d, a, b, c); {stores} }}"

    def _wgmma(self) -> str | None:
        line = self.s.line
        if self.parts[0] == "commit_group":
            return "products_commit();"
        if self.parts[0] == "wait_group":
            return f"products_wait({self.get(0, 'u32')}, {line});"
        shape = re.fullmatch(r"m64n(\d+)k32", self.parts[3])
        if shape is None or self.parts[4] != "s32":
            return None
        outputs = "{" + ", ".join(f"&g.{self.names[x]}" for x in self.each(0)) + "}"
        registers = isinstance(self.s.operands[1], tuple)
        a = f"const u32 a[4] = {self.words(1)};" if registers else "const u32* a = nullptr;"
        descriptors = f"{'0' if registers else self.get(1, 'u64')}, {self.get(2, 'u64')}"
        call = f"group_product<{self.parts[5]}, {shape[1]}>(d, a, {descriptors}, {self.s.operands[3]}, {line});"
        return f"{{ u32* const d[] = {outputs}; {a} {call} }}"
