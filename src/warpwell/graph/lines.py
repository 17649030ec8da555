"""Parse lines of numbers into pairs of vertices, fast: ``PairReader``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpwell.errors import EdgeListError
from warpwell.graph.compressed import ByteReader

Edges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
WeightedEdges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any]]

# Small enough for the temporaries of a block to stay near the processor.
_BLOCK = 1 << 20
# Digits of the largest vertex, 2**48 - 1; longer numbers (leading zeros) take the slow path.
_DIGITS = 15
_SPACE, _NUMBER, _OTHER = 0, 1, 2


def _byte_classes() -> npt.NDArray[np.uint8]:
    classes = np.full(256, _OTHER, np.uint8)
    classes[list(b" \t\r\n")] = _SPACE
    classes[list(b"0123456789+-.eE")] = _NUMBER
    return classes


_CLASSES = _byte_classes()


@dataclass(frozen=True)
class LineRule:
    """The format of a line of a file.

    Attributes
    ----------
    fields : int
        Fields of a line; the first two are the source and the destination, the others are skipped.
    sources, destinations : range
        Numbers that are allowed as source and as destination.
    shape : str
        Description of a correct line, for messages.
    bounds : str
        Reason for the ranges, and what to do, for messages.
    comments : bytes
        A line whose first visible character is one of these is skipped.
    surplus : str
        What to do about a line with too many fields, for messages.
    """

    fields: int
    sources: range
    destinations: range
    shape: str
    bounds: str
    comments: bytes = b"#%"
    surplus: str = ""


class PairReader:
    """Reads lines of numbers, in bounded memory, as chunks of (source, destination).

    Fields are separated by spaces or tabs; lines end in LF or CRLF; blank lines and comment lines are
    skipped. Blocks are parsed with NumPy. A block that breaks the rule is parsed again line by line, so that the
    message names the line.

    Parameters
    ----------
    reader : ByteReader
        Source of the bytes.
    rule : LineRule
        The format of a line.
    line : int
        Number of the first line, counted from 1.
    ahead : bytes
        Bytes that the caller has already read from `reader`, still to be parsed.

    Attributes
    ----------
    line : int
        Number of the next line to be read.

    Raises
    ------
    EdgeListError
        While iterating: a line that breaks the rule. It names the file and the line.
    """

    def __init__(self, reader: ByteReader, rule: LineRule, line: int = 1, ahead: bytes = b"") -> None:
        self._reader = reader
        self._rule = rule
        self._ahead = ahead
        self.line = line

    def __iter__(self) -> Iterator[Edges]:
        for block in self._blocks():
            edges = self._parse(block)
            if edges is None:
                edges = self._parse_slowly(block)
            self.line += block.count(b"\n")
            if edges[0].size:
                yield edges

    def _blocks(self) -> Iterator[bytes]:
        """Yield complete lines, about a block at a time; the last may lack its line end."""
        # Some editors leave a byte order mark.
        rest = self._ahead or self._reader.read(3).removeprefix(b"\xef\xbb\xbf")
        while data := self._reader.read(_BLOCK):
            data = rest + data
            cut = data.rfind(b"\n") + 1
            if cut == 0 and len(data) > 4 * _BLOCK:
                raise _error(
                    self._reader.path,
                    self.line,
                    f"a line of more than {len(data):,} bytes",
                    f"Is this a text file? A line is {self._rule.shape}.",
                )
            rest = data[cut:]
            if cut:
                yield data[:cut]
        if rest:
            yield rest

    def _parse(self, block: bytes) -> Edges | None:
        """Parse a regular block; return None if anything in it is unusual."""
        rule = self._rule
        block = _blank_comments(block, rule.comments)
        # With a line end in front and zeros behind, finding tokens and reading digits has no edge cases.
        data = np.frombuffer(b"\n" + block + b"\n" + bytes(_DIGITS), np.uint8)
        classes = _CLASSES[data[:-_DIGITS]]
        if classes.max() == _OTHER:
            return None
        flips = np.flatnonzero(classes[1:] != classes[:-1])
        flips += 1
        starts, ends = flips[0::2], flips[1::2]
        if starts.size % rule.fields:
            return None
        lines = np.cumsum(data[:-_DIGITS] == ord("\n"), dtype=np.int32)[starts].reshape(-1, rule.fields)
        if (lines != lines[:, :1]).any() or (lines[1:, 0] == lines[:-1, 0]).any():
            return None
        columns = []
        for column, allowed in enumerate((rule.sources, rule.destinations)):
            values = _integers(data, starts[column :: rule.fields], ends[column :: rule.fields])
            if values is None:
                return None
            if values.size and not (allowed.start <= values.min() and values.max() < allowed.stop):
                return None
            columns.append(values)
        return columns[0], columns[1]

    def _parse_slowly(self, block: bytes) -> Edges:
        rows = []
        for number, line in enumerate(block.split(b"\n"), self.line):
            fields = line.split()
            if fields and fields[0][0] not in self._rule.comments:
                rows.append(self._row(fields, number))
        pairs = np.array(rows, np.int64).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])

    def _row(self, fields: list[bytes], line: int) -> tuple[int, int]:
        rule, path = self._rule, self._reader.path
        if len(fields) != rule.fields:
            found = b" ".join(fields)[:60].decode("ascii", "backslashreplace")
            advice = "Correct or remove the line. " + rule.surplus * (len(fields) > rule.fields)
            raise _error(path, line, f"expected {rule.shape}, found {found!r}", advice.strip())
        pair = []
        for field, allowed, name in zip(
            fields, (rule.sources, rule.destinations), ("source", "destination"), strict=False
        ):
            text = field[:40].decode("ascii", "backslashreplace")
            digits = field[1:] if field[:1] in (b"-", b"+") else field
            if not digits.isdigit() or field[:1] == b"+":
                raise _error(path, line, f"the {name} {text!r} is not an integer", f"A line is {rule.shape}.")
            if field[:1] == b"-":
                raise _error(
                    path,
                    line,
                    f"the {name} {text} is negative",
                    f"Vertices are numbered from {allowed.start}.",
                )
            # 20 digits tell that a number is too large; Python refuses to convert thousands of them.
            value = int(digits.lstrip(b"0")[:20] or b"0")
            if value not in allowed:
                raise _error(
                    path,
                    line,
                    f"the {name} {text} is not in {allowed.start} to {allowed.stop - 1}",
                    rule.bounds,
                )
            pair.append(value)
        for field in fields[2:]:
            try:
                float(field)
            except ValueError:
                text = field[:40].decode("ascii", "backslashreplace")
                raise _error(
                    path, line, f"the value {text!r} is not a number", f"A line is {rule.shape}."
                ) from None
        return pair[0], pair[1]


def _blank_comments(block: bytes, comments: bytes) -> bytes:
    """Remove the text of comment lines but keep their line ends, so that line numbers are kept."""
    if not any(mark in block for mark in comments):
        return block
    marks = tuple(bytes((mark,)) for mark in comments)
    return b"\n".join(b"" if line.lstrip().startswith(marks) else line for line in block.split(b"\n"))


def _integers(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]
) -> npt.NDArray[np.int64] | None:
    """Return the values of all tokens, digit by digit; or None if one has other characters than digits."""
    values = np.zeros(starts.size, np.int64)
    if not starts.size:
        return values
    lengths = ends - starts
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest > _DIGITS:
        return None
    for place in range(longest):
        digits = data[starts + place] - np.uint8(ord("0"))
        if place < shortest:
            if digits.max() > 9:
                return None
            values *= 10
            values += digits
        else:
            more = lengths > place
            if digits[more].max() > 9:
                return None
            values = np.where(more, values * 10 + digits, values)
    return values


def _error(path: Path, line: int, problem: str, advice: str) -> EdgeListError:
    return EdgeListError(f"{path}, line {line}: {problem}. {advice}", path=path, line=line)
