"""Parse lines of numbers into pairs of vertices, fast: ``PairReader``."""

import csv
import re
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
# Characters of a weight; longer ones take the slow path.
_WIDEST = 32
# From here on float32 is infinite.
_FLOAT_MAX = 2.0**128 - 2.0**103
_INTEGER = re.compile(rb"[+-]?\d{1,18}")


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
        Fields of a line.
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
    columns : (int, int)
        The fields that are source and destination.
    weight : int or None
        The field that is the weight. Other fields are skipped.
    whole : bool
        Weights are integers of 32 bits; otherwise also finite floats that float32 can hold.
    numbers : bool
        Fields that are skipped are numbers, too.
    separator : str
        What separates fields that may be quoted: a comma or a tab; empty for spaces and tabs.
    """

    fields: int
    sources: range
    destinations: range
    shape: str
    bounds: str
    comments: bytes = b"#%"
    surplus: str = ""
    columns: tuple[int, int] = (0, 1)
    weight: int | None = None
    whole: bool = False
    numbers: bool = True
    separator: str = ""


class PairReader:
    """Reads lines of numbers, in bounded memory, as chunks of (source, destination) or (source, destination, weight).

    Weights are int64 in a chunk of integers, else float64. Fields are separated as the rule says; lines end in LF or
    CRLF; blank lines and comment lines are skipped. Blocks are parsed with NumPy. A block that breaks the rule is
    parsed again line by line, so that the message names the line.

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

    def __iter__(self) -> Iterator[Edges | WeightedEdges]:
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

    def _parse(self, block: bytes) -> Edges | WeightedEdges | None:
        """Parse a regular block; return None if anything in it is unusual."""
        rule = self._rule
        block = _blank_comments(block, rule.comments)
        if rule.separator:
            spaced = _spaced(block, rule.separator.encode())
            if spaced is None:
                return None
            block = spaced
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
        for column, allowed in zip(rule.columns, (rule.sources, rule.destinations), strict=True):
            values = _integers(data, starts[column :: rule.fields], ends[column :: rule.fields])
            if values is None:
                return None
            if values.size and not (allowed.start <= values.min() and values.max() < allowed.stop):
                return None
            columns.append(values)
        if rule.weight is None:
            return columns[0], columns[1]
        weights = _numbers(data, starts[rule.weight :: rule.fields], ends[rule.weight :: rule.fields])
        if weights is None or not _fit(weights, rule.whole):
            return None
        return columns[0], columns[1], weights

    def _parse_slowly(self, block: bytes) -> Edges | WeightedEdges:
        rows, weights = [], []
        for number, line in enumerate(block.split(b"\n"), self.line):
            fields = self._fields(line, number)
            if fields:
                rows.append(self._row(fields, number))
                if self._rule.weight is not None:
                    weights.append(self._weight(fields[self._rule.weight], number))
        pairs = np.array(rows, np.int64).reshape(-1, 2)
        edges = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
        if self._rule.weight is None:
            return edges
        whole = all(isinstance(weight, int) and abs(weight) < 1 << 62 for weight in weights)
        return *edges, np.array(weights, np.int64 if whole else np.float64)

    def _fields(self, line: bytes, number: int) -> list[bytes]:
        """Return the fields of a line; none for a blank line or a comment."""
        line = line.strip(b"\r\n")
        if not line.strip() or line.lstrip()[0] in self._rule.comments:
            return []
        if not self._rule.separator:
            return line.split()
        try:
            text = line.decode("utf-8", "surrogateescape")
            fields = next(csv.reader([text], delimiter=self._rule.separator, strict=True, skipinitialspace=True))
        except csv.Error as error:
            raise _error(
                self._reader.path,
                number,
                f"a quoted field that does not end ({error})",
                "Close its quotes in the same line.",
            ) from None
        return [field.strip().encode("utf-8", "surrogateescape") for field in fields]

    def _weight(self, field: bytes, line: int) -> int | float:
        rule = self._rule
        text = field[:40].decode("ascii", "backslashreplace")
        try:
            if b"_" in field:
                raise ValueError
            value: int | float = int(field) if _INTEGER.fullmatch(field) else float(field)
        except ValueError:
            shape = f"A line is {rule.shape}."
            raise _error(self._reader.path, line, f"the weight {text!r} is not a number", shape) from None
        if not _fit(np.array([float(value)]), rule.whole):
            need = (
                "a whole number of 32 bits. For others choose the weights float32."
                if rule.whole
                else "a finite number, at most 3.4e38. Correct or remove the line."
            )
            raise _error(self._reader.path, line, f"the weight {text} does not fit", f"A weight is {need}")
        return value

    def _row(self, fields: list[bytes], line: int) -> tuple[int, int]:
        rule, path = self._rule, self._reader.path
        if len(fields) != rule.fields:
            found = b" ".join(fields)[:60].decode("ascii", "backslashreplace")
            if "," in found and not rule.separator:
                advice = "Separate fields by spaces (.csv files have commas, and a header such as 'source,target')."
            else:
                advice = "Correct or remove the line. " + rule.surplus * (len(fields) > rule.fields)
            raise _error(path, line, f"expected {rule.shape}, found {found!r}", advice.strip())
        pair = []
        ends = [fields[column] for column in rule.columns]
        for field, allowed, name in zip(
            ends, (rule.sources, rule.destinations), ("source", "destination"), strict=True
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
        for k, field in enumerate(fields):
            if not rule.numbers or k in rule.columns or k == rule.weight:
                continue
            try:
                float(field)
            except ValueError:
                text = field[:40].decode("ascii", "backslashreplace")
                raise _error(path, line, f"the value {text!r} is not a number", f"A line is {rule.shape}.") from None
        return pair[0], pair[1]


def _spaced(block: bytes, separator: bytes) -> bytes | None:
    """Return lines of fields with spaces between them; None if quotes or spaces in fields make that ambiguous."""
    if b'"' in block:
        block = re.sub(rb'(?m)(^|%b)"([^"%b\r\n ]*)"(?=%b|\r?$)' % ((separator,) * 3), rb"\1\2", block)
        if b'"' in block:
            return None
    if re.search(rb"[^\s%b] +[^\s%b]" % (separator, separator), block):
        return None
    if separator != b"\t" and b"\t" in block:
        return None
    return block.replace(separator, b" ")


def _numbers(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]
) -> npt.NDArray[Any] | None:
    """Return the values of all tokens: int64 if all are integers, else float64; None if one is no number."""
    minus = data[starts] == ord("-")
    signs = minus | (data[starts] == ord("+"))
    if not (ends - starts - signs > 0).all():
        return None
    values = _integers(data, starts + signs, ends)
    if values is not None:
        return np.where(minus, -values, values)
    width = int((ends - starts).max())
    if width > _WIDEST:
        return None
    places = np.arange(width)
    text = data[np.minimum(starts[:, None] + places, data.size - 1)]
    text[places >= (ends - starts)[:, None]] = 0
    if (text == ord("_")).any():  # Python's numbers may have these, a file's do not
        return None
    try:
        return np.ascontiguousarray(text).view(f"S{width}")[:, 0].astype(np.float64)
    except ValueError:
        return None


def _fit(weights: npt.NDArray[Any], whole: bool) -> bool:
    """Tell whether all weights are integers of 32 bits, or finite numbers that float32 can hold."""
    if not weights.size:
        return True
    low, high = weights.min(), weights.max()
    if whole:
        return bool(-(2**31) <= low and high < 2**31 and (weights == np.trunc(weights)).all())
    return bool(max(-low, high) < _FLOAT_MAX)


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
