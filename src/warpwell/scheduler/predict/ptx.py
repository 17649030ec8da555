"""Program: a kernel's PTX as basic blocks, loops, and an estimate of the machine instructions of each statement.

PTX is what the compiler makes before the driver's assembler does the rest. It needs no GPU, and its control flow is
that of the machine code; a statement becomes none, one or a few machine instructions (`Statement.weight`).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

from ... import errors

FLOAT, INTEGER, SPECIAL, LOAD, STORE, ATOMIC, CONTROL, MOVE = (
    "float", "integer", "special", "load", "store", "atomic", "control", "move",
)  # fmt: skip
KINDS = (FLOAT, INTEGER, SPECIAL, LOAD, STORE, ATOMIC, CONTROL, MOVE)

_REGISTER = re.compile(r"%[A-Za-z_][\w$]*(?:\.[xyz])?")
_SPECIAL_REGISTER = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid|smid|clock64|globaltimer|clock)$")
_WRITES_NOTHING = {"st", "bra", "ret", "exit", "bar", "barrier", "membar", "fence", "red", "trap", "prefetch",
                   "nanosleep", "discard", "brkpt", "pmevent", "cp", "applypriority"}  # fmt: skip
_LONG = {"div.f32": 9.0, "div.f64": 20.0, "div.s64": 70.0, "div.u64": 70.0, "div.s32": 18.0, "div.u32": 14.0,
         "rem.s64": 75.0, "rem.u64": 75.0, "rem.s32": 20.0, "rem.u32": 16.0, "sqrt.f32": 8.0, "sqrt.f64": 22.0,
         "rcp.f32": 7.0, "rcp.f64": 12.0, "rsqrt.f64": 15.0}  # fmt: skip
"""Machine instructions of what the hardware has no single instruction for."""
_CALL = 30.0


@dataclass(frozen=True)
class Statement:
    """One PTX instruction.

    Attributes
    ----------
    opcode : str
        With its modifiers: "setp.lt.s64".
    operands : tuple of str
        Destination first, as written.
    guard : str or None
        Predicate register that it is executed under.
    negated : bool
        Whether under its contrary.
    """

    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None
    negated: bool = False

    @functools.cached_property
    def parts(self) -> list[str]:
        """The opcode's parts."""
        return self.opcode.split(".")

    @functools.cached_property
    def type(self) -> str:
        """Its last type: "s64"."""
        return self.parts[-1] if len(self.parts) > 1 else ""

    @functools.cached_property
    def bits(self) -> int:
        """Width of its last type (32 where it has none)."""
        found = re.search(r"(\d+)$", self.type)
        return int(found[1]) if found else 32

    @functools.cached_property
    def writes(self) -> tuple[str, ...]:
        """Registers that it sets."""
        if self.parts[0] in _WRITES_NOTHING or not self.operands:
            return ()
        names = _REGISTER.findall(self.operands[0])
        return tuple(n for n in names if not _SPECIAL_REGISTER.match(n))

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """Registers that it takes, its guard among them."""
        sources = self.operands[1:] if self.writes else self.operands
        names = [n for text in sources for n in _REGISTER.findall(text) if not _SPECIAL_REGISTER.match(n)]
        if self.guard is not None:
            names.append(self.guard)
            names += self.writes  # where the guard is false, the old value stays
        return tuple(dict.fromkeys(names))

    @functools.cached_property
    def kind(self) -> str:
        """One of `KINDS`."""
        first = self.parts[0]
        if first == "ld":
            return MOVE if "param" in self.parts else LOAD
        if first in ("st", "atom", "red"):
            return STORE if first == "st" else ATOMIC
        if first in ("bra", "brx", "ret", "exit", "call", "bar", "barrier", "trap"):
            return CONTROL
        if first in ("mov", "cvta"):
            return MOVE
        if first in ("sin", "cos", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "div") and self.type[:1] in "fb":
            return SPECIAL
        return FLOAT if self.type in ("f16", "f32", "f64", "bf16", "f16x2") else INTEGER

    @functools.cached_property
    def weight(self) -> float:
        """About how many machine instructions it becomes on compute capability 9.0."""
        first = self.parts[0]
        if first in ("cvta", "bar.warp"):
            return 0.0
        if first == "call":
            return _CALL
        if f"{first}.{self.type}" in _LONG and "approx" not in self.parts:
            return _LONG[f"{first}.{self.type}"]
        if first == "mov":
            return 0.5
        if first == "cvt":
            return 1.0 if self.type[0] == "f" or any(p[0] == "f" for p in self.parts[1:]) else 0.5
        if self.kind == INTEGER and self.bits == 64:
            if first == "shl":
                return 0.5  # scaled addresses: it goes into the addition
            if first in ("mul", "mad"):
                return 1.0 if "wide" in self.parts else 4.0
            return 2.0
        return 1.0

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes a thread loads or stores."""
        if self.kind not in (LOAD, STORE, ATOMIC):
            return 0
        count = 4 if "v4" in self.parts else 2 if "v2" in self.parts else 1
        return count * self.bits // 8


@dataclass
class Block:
    """A basic block.

    Attributes
    ----------
    statements : list of Statement
    successors : list of int
        Blocks that may follow: the branch's target first; ``len(program.blocks)`` is the end.
    """

    statements: list[Statement] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)

    @property
    def branch(self) -> Statement | None:
        """The branch or return that ends it, if one does."""
        last = self.statements[-1] if self.statements else None
        return last if last is not None and last.parts[0] in ("bra", "ret", "exit") else None

    def total(self, kind: str | None = None) -> float:
        """Machine instructions of one execution, of one kind or all."""
        return sum(s.weight for s in self.statements if kind is None or s.kind == kind)


@dataclass
class Program:
    """A kernel's PTX.

    Attributes
    ----------
    name : str
        Mangled.
    parameters : list of str
        Their names, in order.
    blocks : list of Block
        In the order of the text, the entry first.
    """

    name: str
    parameters: list[str]
    blocks: list[Block]

    @functools.cached_property
    def control(self) -> list[list[Statement]]:
        """For each block, the statements that control flow depends on, in order."""
        writers: dict[str, list[Statement]] = {}
        for block in self.blocks:
            for statement in block.statements:
                for name in statement.writes:
                    writers.setdefault(name, []).append(statement)
        wanted: set[int] = set()
        pending = [b.branch.guard for b in self.blocks if b.branch is not None and b.branch.guard is not None]
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for statement in writers.get(name, ()):
                wanted.add(id(statement))
                pending += statement.reads
        return [[s for s in block.statements if id(s) in wanted] for block in self.blocks]

    @functools.cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """Natural loops: header and its blocks (loops that share a header are one)."""
        end = len(self.blocks)
        before: list[list[int]] = [[] for _ in range(end + 1)]
        for k, block in enumerate(self.blocks):
            for successor in block.successors:
                before[successor].append(k)
        everything = frozenset(range(end))
        dominators = [frozenset([0])] + [everything] * (end - 1)
        changed = True
        while changed:
            changed = False
            for k in range(1, end):
                above = [dominators[p] for p in before[k]]
                new = (frozenset.intersection(*above) if above else frozenset()) | {k}
                if new != dominators[k]:
                    dominators[k], changed = new, True
        loops: dict[int, set[int]] = {}
        for k, block in enumerate(self.blocks):
            for header in block.successors:
                if header < end and header in dominators[k]:
                    body = loops.setdefault(header, {header})
                    pending = [k]
                    while pending:
                        node = pending.pop()
                        if node not in body:
                            body.add(node)
                            pending += before[node]
        return {header: frozenset(body) for header, body in loops.items()}

    @property
    def statements(self) -> int:
        """Statements of the text."""
        return sum(len(block.statements) for block in self.blocks)


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*((?:\.\w+[^{\n]*\n)*)\s*\{", re.DOTALL)
_GUARD = re.compile(r"@(!?)(%[\w$]+)\s+")
_LABEL = re.compile(r"([$\w]+):(?!:)\s*")


def parse(text: str) -> Program:
    """Read the first kernel of a PTX module.

    Raises
    ------
    FormatError
        There is no kernel, or a branch leads nowhere.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    entry = _ENTRY.search(text)
    if entry is None:
        raise errors.FormatError("the PTX has no kernel (.entry): give what the compiler made, whole")
    parameters = [p.split()[-1].split("[")[0] for p in entry[2].split(",") if p.strip()]
    blocks, labels = [Block()], {}
    for piece in _body(text, entry.end()).split(";"):
        statement = piece.strip()
        while statement[:1] in ("{", "}"):
            statement = statement[1:].lstrip()
        while (label := _LABEL.match(statement)) is not None:
            if blocks[-1].statements:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
            statement = statement[label.end() :].lstrip("{} \n\t")
        parsed = _statement(statement)
        if parsed is None:
            continue
        blocks[-1].statements.append(parsed)
        if parsed.parts[0] in ("bra", "ret", "exit", "brx"):
            blocks.append(Block())
    if not blocks[-1].statements and len(blocks) > 1 and len(blocks) - 1 not in labels.values():
        blocks.pop()
    for k, block in enumerate(blocks):
        block.successors = _successors(block, k, len(blocks), labels)
    return Program(entry[1], parameters, blocks)


def _body(text: str, start: int) -> str:
    depth = 1
    for k in range(start, len(text)):
        depth += (text[k] == "{") - (text[k] == "}")
        if depth == 0:
            return text[start:k]
    raise errors.FormatError("the PTX ends within a kernel: give what the compiler made, whole")


def _statement(text: str) -> Statement | None:
    guard, negated = None, False
    found = _GUARD.match(text)
    if found is not None:
        guard, negated, text = found[2], bool(found[1]), text[found.end() :]
    if not text or text.startswith("."):
        return None
    opcode, _, rest = text.partition(" ") if "\t" not in text.split(" ")[0] else text.partition("\t")
    operands, depth, begun = [], 0, 0
    for k, letter in enumerate(rest):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            operands.append(rest[begun:k].strip())
            begun = k + 1
    operands.append(rest[begun:].strip())
    return Statement(opcode.strip(), tuple(o for o in operands if o), guard, negated)


def _successors(block: Block, k: int, end: int, labels: dict[str, int]) -> list[int]:
    branch = block.branch
    if branch is None:
        return [k + 1]
    if branch.parts[0] == "bra":
        name = branch.operands[-1]
        if name not in labels:
            raise errors.FormatError(f"the PTX branches to {name!r}, which is not there")
        target = labels[name]
    else:
        target = end
    return [target] if branch.guard is None else [target, k + 1]
