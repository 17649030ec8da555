"""CUDA C++ source as text: a kernel's parameters, and whether its blocks can be claimed one by one.

Nothing here compiles. What a program does is not known from its text in general, so doubt costs a form and not a
result: a kernel that might leave before a barrier runs whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ... import errors
from .parameters import Parameter, aliases, parameters

_LITERAL = re.compile(
    r'R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\''
    r"|//(?:\\\n|[^\n])*|/\*.*?\*/",
    re.DOTALL,
)
_ATTRIBUTES = ("__launch_bounds__", "__maxnreg__", "__cluster_dims__", "__block_size__", "__attribute__", "__align__")
_FUNCTION = re.compile(r"(~|\boperator\b)?\s*\b([A-Za-z_]\w*)\s*\(")
_AFTER = re.compile(r"\s*(?:const|noexcept|mutable|override|->\s*[\w:<>\s*&]+?)*\s*\{")
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", re.MULTILINE)
_STRUCT = re.compile(r"\b(?:struct|class|union)\s+(?:__\w+__(?:\([^)]*\))?\s+)*(\w+)[^;{()]*\{")
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)?\s*\(")
_VARIABLE = re.compile(r"\b__(?:device|managed)__\b([^;(){}]*)[;=\[{]")
_NO_VARIABLE = re.compile(r"\b(?:const|constexpr|struct|class|union|enum|operator)\b")
_BARRIER = r"__syncthreads\w*|__barrier_sync\w*|\w*[bB]arrier\w*|\w*pipeline\w*|sync|arrive\w*|wait\w*"
_LOOP = re.compile(r"\b(for|while|do)\b")
_LAMBDA = re.compile(r"\[[&=\w\s,*]*\]\s*(?:\([^()]*\))?\s*(?:mutable)?\s*(?:->[\w\s*&:]+)?\{")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"\n]*)", re.MULTILINE)
_KEYWORDS = {"if", "for", "while", "switch", "catch", "return", "sizeof", "alignof", "decltype", "asm", "defined"}

_NO_BARRIERS = {
    "cooperative_groups.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuComplex.h", "math_constants.h", "math.h",
    "stdint.h", "stddef.h", "float.h", "limits.h", "stdio.h", "assert.h", "cstdint", "cstddef", "cmath", "climits",
    "cfloat", "cuda/std/cstdint", "cuda/std/cstddef", "cuda/std/limits", "cuda/std/complex", "cuda/std/cmath",
    "cuda/std/type_traits", "type_traits", "limits", "cuda_runtime.h", "device_launch_parameters.h", "vector_types.h",
    "mma.h", "curand_kernel.h", "cuda/std/utility", "cuda/std/tuple", "cuda/std/array", "cooperative_groups/reduce.h",
}  # fmt: skip
"""Headers that hide no barrier from the text: what they have is named where it is used."""


class Whole(NamedTuple):
    """A construct that keeps blocks from being claimed; `grid` where the launch has to be cooperative."""

    construct: str
    pattern: re.Pattern[str]
    why: str


_WHOLE = (
    Whole(
        "grid-wide synchronization",
        re.compile(r"\b(?:this_grid|grid_group|this_multi_grid|multi_grid_group)\b"),
        "every block waits for all others",
    ),
    Whole(
        "cluster",
        re.compile(r"\b(?:__cluster_dims__|__block_size__|this_cluster|cluster_group|__cluster\w*)\b"),
        "the hardware starts the blocks of a cluster together",
    ),
)


class SourceText:
    """What the text of a program says of one kernel.

    Parameters
    ----------
    code : str
    name : str
        Of the kernel.
    options : sequence of str
        Of the compiler: their macros count.

    Attributes
    ----------
    parameters : list of Parameter
    reason : TransformError or None
        Why workers cannot run it.
    cooperative : bool
        Whether its blocks wait for one another, so that all must be resident.

    Raises
    ------
    TransformError
        There is no such kernel, or it can be run in no form.
    """

    def __init__(self, code: str, name: str, options: Sequence[str] = ()) -> None:
        self.code = code
        self.name = name
        self._options = options
        self._text = _blank(code, strings=True)
        self._kernels = self._definitions()
        start, (first, last), self._body = self._kernel()
        self._refuse(start)
        self.parameters: list[Parameter] = parameters(
            self._text[first:last], aliases(self._text, options), name, self._line(first)
        )
        self._asm = [(m.start(), text) for m, text in self._assembly()]
        self.cooperative = bool(_WHOLE[0].pattern.search(self._text))
        self.reason = self._whole() or self._leaves()

    # -- finding things ------------------------------------------------------------------------------------------

    def _line(self, place: int) -> int:
        return self.code.count("\n", 0, place) + 1

    def _error(self, construct: str, place: int, what: str) -> errors.TransformError:
        line = self._line(place)
        return errors.TransformError(f"CUDA kernel {self.name!r}, line {line}: {what}", construct=construct, line=line)

    def _definitions(self) -> dict[str, list[tuple[int, tuple[int, int], tuple[int, int]]]]:
        """Return the kernels: where each begins, its parameters, and its body."""
        found: dict[str, list[tuple[int, tuple[int, int], tuple[int, int]]]] = {}
        for match in re.finditer(r"\b__global__\b", self._text):
            for call in _FUNCTION.finditer(self._text, match.end()):
                closing = _closing(self._text, call.end() - 1)
                if call[2] in _ATTRIBUTES:
                    continue
                brace = re.compile(r"\s*\{").match(self._text, closing)
                if brace and call[2] not in _KEYWORDS:
                    body = brace.end() - 1, _closing(self._text, brace.end() - 1)
                    found.setdefault(call[2], []).append((match.start(), (call.end(), closing - 1), body))
                break
        return found

    def _kernel(self) -> tuple[int, tuple[int, int], tuple[int, int]]:
        if self.name not in self._kernels:
            names = ", ".join(self._kernels) or "none"
            raise errors.TransformError(
                f'CUDA source has no kernel {self.name!r} (it has: {names}): define it as extern "C" __global__ void '
                f"{self.name}(...)",
                construct="kernel",
            )
        found = self._kernels[self.name]
        if len({" ".join(self._text[a:b].split()) for _, (a, b), _ in found}) > 1:
            raise self._error("overload", found[1][0], "it is defined twice with other parameters: rename one of them")
        return found[0]

    def _refuse(self, start: int) -> None:
        before = max(self._text.rfind(c, 0, start) for c in ";}{")
        if re.search(r"\btemplate\b", self._text[before + 1 : start]):
            raise self._error(
                "template", start, 'a template has no name to launch: write an extern "C" kernel that calls it'
            )
        if "<<<" in self._text:
            raise self._error(
                "dynamic parallelism",
                self._text.index("<<<"),
                "kernels that launch kernels are not supported: launch them one after the other from Python",
            )

    def _assembly(self) -> Iterator[tuple[re.Match[str], str]]:
        with_strings = _blank(self.code, strings=False)
        for match in _ASM.finditer(self._text):
            yield match, with_strings[match.end() : _closing(self._text, match.end() - 1)]

    # -- what keeps blocks together ------------------------------------------------------------------------------

    def _whole(self) -> errors.TransformError | None:
        runs = "so it runs whole and cannot be preempted"
        for construct, pattern, why in _WHOLE:
            found = pattern.search(self._text)
            if found:
                return self._error(construct, found.start(), f"{found[0]}: {why}, {runs}")
        for place, text in self._asm:
            register = re.search(r"%(?:n?ctaid|gridid|envreg\w*|\w*cluster\w*)|\b\w*\.cluster\b", text)
            if register:
                what = f"assembly with {register[0]} asks the hardware where its block is, {runs}; use blockIdx"
                return self._error("asm", place, what)
        plain = re.sub(r"\b(?:__align__|alignas)\s*\([^()]*\)", lambda m: " " * len(m[0]), self._text)
        for match in _VARIABLE.finditer(plain):
            if match[1].strip() and not _NO_VARIABLE.search(match[1]):
                return self._error(
                    "__device__ variable",
                    match.start(),
                    f"a variable of the program has one copy in each form of the kernel, {runs}; pass an array",
                )
        static = re.compile(r"\bstatic\s+(?!const\b|constexpr\b|__shared__\b)").search(self._text, *self._body)
        if static:
            return self._error(
                "static variable",
                static.start(),
                f"a static variable has one copy in each form of the kernel, {runs}; pass an array",
            )
        return None

    def _leaves(self) -> errors.TransformError | None:
        """Return why a thread may leave before a barrier that others reach: it would be at the workers' own barrier."""
        whole = "it runs whole"
        for place, text in self._asm:
            if re.search(r"(?:^|[\s;{\"])(?:exit|ret)\s*;", text):
                return self._error("asm", place, f"assembly ends threads, which a worker's must not: {whole}")
        start, end = self._body
        body = self._text[start:end]
        barrier, returns, hidden = self._tainted()
        waits = [m.start() for m in barrier.finditer(body)]
        waits += [p - start for p, text in self._asm if start <= p < end and re.search(r"\bbar|barrier", text)]
        loops = list(_loops(body))
        unclear = hidden or re.search(r"\bgoto\b", body) or (_LAMBDA.search(body) and waits)
        for match in returns.finditer(body):
            place = match.start()
            rest = body[body.find(";", place) :].strip(" \t\n;}")
            together = any(a <= place < b and any(a <= w < b for w in waits) for a, b in loops)
            if any(w > place for w in waits) or together or (unclear and rest):
                return self._error(
                    "return before barrier",
                    start + place,
                    f"it may return before a barrier that others of its block reach: {whole}; let all threads reach "
                    f"the barrier",
                )
        return None

    def _tainted(self) -> tuple[re.Pattern[str], re.Pattern[str], bool]:
        """Return what stands for a barrier, what for a return, and whether there may be barriers that nobody sees."""
        text = self._text
        functions = {m[2]: "" for m in _FUNCTION.finditer(text) if m[2] not in _KEYWORDS}
        seen = [body for found in self._kernels.values() for _, _, body in found]
        hidden = any(header.strip() not in _NO_BARRIERS for header in _INCLUDE.findall(self.code))
        for match in _FUNCTION.finditer(text):
            brace = _AFTER.match(text, _closing(text, match.end() - 1))
            if match[1] or match[2] in _KEYWORDS or match[2] in self._kernels or not brace:
                continue  # what runs without being called by its name is looked at with its class
            span = brace.end() - 1, _closing(text, brace.end() - 1)
            seen.append(span)
            functions[match[2]] += text[slice(*span)] + self._strings(*span)
        macros = dict(re.findall(r"^(?:-D|--define-macro=)\s*(\w+)(.*)$", "\n".join(self._options), re.MULTILINE))
        hidden = hidden or any(o.startswith(("-include", "--pre-include")) for o in self._options)
        for match in _MACRO.finditer(text):
            seen.append(match.span())
            macros[match[1]] = match[2]
        names: set[str] = set()
        returning = {"return"}
        for _ in range(len(functions) + len(macros)):
            barrier, leaving = _any(names, _BARRIER), _any(returning)
            more = {n for n, body in (*functions.items(), *macros.items()) if barrier.search(body)} - names
            leave = {n for n, body in macros.items() if leaving.search(body)} - returning
            if not more and not leave:
                break
            names |= more
            returning |= leave
        barrier = _any(names, _BARRIER)
        body = text[slice(*self._body)]
        for match in _STRUCT.finditer(text):
            span = match.end() - 1, _closing(text, match.end() - 1)
            seen.append(span)
            if barrier.search(text, *span) and re.search(rf"\b{match[1]}\b", body):
                hidden = True
        outside = list(text)
        for a, b in seen:
            outside[a:b] = " " * (b - a)
        return barrier, _any(returning), hidden or _hides("".join(outside))

    def _strings(self, first: int, last: int) -> str:
        """Return a word that is a barrier where assembly between two places has one."""
        return " barrier " if any(first <= p < last and re.search(r"\bbar|barrier", t) for p, t in self._asm) else ""


def _hides(outside: str) -> bool:
    """Tell whether a call of a barrier stands where no function was recognized."""
    return bool(re.search(r"\b(?:__syncthreads\w*|__barrier_sync\w*|sync|arrive_and_wait)\s*\(", outside))


def _any(names: set[str], pattern: str = "") -> re.Pattern[str]:
    parts = [*map(re.escape, sorted(names)), *([pattern] if pattern else [])]
    return re.compile(rf"\b(?:{'|'.join(parts)})\b")


def _blank(code: str, *, strings: bool) -> str:
    """Return the code with comments (and what is in strings) as spaces, every character in its place."""

    def space(match: re.Match[str]) -> str:
        found = match[0]
        blank = re.sub(r"[^\n]", " ", found)
        if found.startswith("/"):
            return blank
        return found[0] + blank[1:-1] + found[-1] if strings else found

    return _LITERAL.sub(space, code)


def _closing(text: str, place: int) -> int:
    """Return the place behind the bracket that closes the one at `place`."""
    opening, depth = text[place], 0
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    for match in re.compile(rf"[{re.escape(opening + closing)}]").finditer(text, place):
        depth += 1 if match[0] == opening else -1
        if depth == 0:
            return match.end()
    return len(text)


def _loops(body: str) -> Iterator[tuple[int, int]]:
    for match in _LOOP.finditer(body):
        yield match.start(), _statement(body, match.start())


def _statement(text: str, place: int) -> int:
    """Return the end of the statement that begins at `place`."""
    place += len(text[place:]) - len(text[place:].lstrip())
    if text[place : place + 1] == "{":
        return _closing(text, place)
    word: Any = re.compile(r"(for|while|if|do|else)\b\s*").match(text, place)
    if not word:
        end = text.find(";", place)
        return len(text) if end < 0 else end + 1
    place = word.end()
    if text[place : place + 1] == "(":
        place = _closing(text, place)
    return _statement(text, place)
