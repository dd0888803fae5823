"""Parses PTX text as NVRTC writes it: the statements of its one kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    """`@predicate opcode operands;` with the names of `Kernel.registers`.

    Attributes:
        predicate: a register, "!" before it where it is negated; or None.
        opcode: its parts, "setp.lt.s32" is ("setp", "lt", "s32").
        operands: as written; a list of them from braces.
        line: in the text.
    """

    predicate: str | None
    opcode: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    line: int


@dataclass(frozen=True)
class Label:
    name: str


@dataclass
class Kernel:
    """parameters: bytes of each; registers: name -> type; shared: name -> offset, shared_bytes without dynamic ones;
    cluster: its CTAs along each axis.
    """

    parameters: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    cluster: tuple[int, ...] = (1, 1, 1)
    statements: list[Instruction | Label] = field(default_factory=list)


_STATEMENT = re.compile(r"(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_SHARED = re.compile(r"\.shared \.align (\d+) \.(b8|u32) ([\w$]+)(?:\[(\d*)\])?;")  # bytes, or one number
_SPACE, _LABEL = re.compile(r"\s*"), re.compile(r"([$\w]+):")


def parse(text: str) -> Kernel:
    """Parses the one entry of a module.

    Raises:
        ValueError: a statement that this parser does not know.
    """
    text = re.sub(r"//[^\n]*", "", text)
    head = re.search(r"\.entry \w+\((.*?)\)([^{]*)\{", text, re.DOTALL)
    if head is None:
        raise ValueError("no entry")
    kernel = Kernel({m[1]: int(m[2]) for m in re.finditer(r"\.b8 (\w+)\[(\d+)\]", head[1])})
    if cluster := re.search(r"\.reqnctapercluster (\d+), (\d+), (\d+)", head[2]):
        kernel.cluster = tuple(map(int, cluster.groups()))
    found = [(name, int(align), int(size or 4 * (of == "u32"))) for align, of, name, size in _SHARED.findall(text)]
    for name, align, size in sorted(found, key=lambda x: x[2] == 0):  # the dynamic one last
        kernel.shared[name] = -(-kernel.shared_bytes // align) * align
        kernel.shared_bytes = kernel.shared[name] + size
    scopes: list[dict[str, str]] = [{}]
    at, line = head.end(), 1 + text.count("\n", 0, head.end())
    while scopes:
        start, at = at, _SPACE.match(text, at).end()
        if text[at] in "{}":
            scopes.append({}) if text[at] == "{" else scopes.pop()
            at += 1
        elif label := _LABEL.match(text, at):
            name = label[1]
            if name[0] != "$":  # of a block of inline assembly
                name = scopes[-1].setdefault(name, f"{name}_{len(kernel.statements)}")
            kernel.statements.append(Label(name))
            at = label.end()
        else:
            end = text.index(";", at)
            _statement(kernel, scopes, text[at:end], line + text.count("\n", start, at))
            at = end + 1
        line += text.count("\n", start, at)
    return kernel


def _statement(kernel: Kernel, scopes: list[dict[str, str]], text: str, line: int) -> None:
    if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL):
        for name in re.split(r"\s*,\s*", declared[2].strip()):
            if many := re.fullmatch(r"(%\w+)<(\d+)>", name):
                kernel.registers |= {f"{many[1]}{i}": declared[1] for i in range(int(many[2]))}
            else:
                scopes[-1][name] = f"%{name}_{len(kernel.registers)}"
                kernel.registers[scopes[-1][name]] = declared[1]
    elif found := _STATEMENT.fullmatch(text):
        known = {name: new for scope in scopes for name, new in scope.items()}

        def renamed(x: str) -> str:
            return re.sub(r"[%$\w]+", lambda m: known.get(m[0], m[0]), x) if known else x

        predicate, opcode, operands = found.groups()
        parts = tuple(re.split(r"\.|::", opcode))
        kernel.statements.append(
            Instruction(predicate and renamed(predicate), parts, _operands(renamed(operands)), line)
        )
    elif not text.startswith((".pragma", ".shared")):
        raise ValueError(f"line {line}: {text!r}")


def _operands(text: str) -> tuple[str | tuple[str, ...], ...]:
    """Splits operands at commas outside of braces and brackets."""
    parts, depth = [""], 0
    for c in text.strip():
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    parts = [part.strip() for part in parts if part.strip()]
    return tuple(tuple(x.strip() for x in p[1:-1].split(",")) if p[0] == "{" else p for p in parts)
