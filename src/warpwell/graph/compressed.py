"""Plain bytes of a file that may be compressed: ``ByteReader``."""

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from warpwell.errors import FormatError, MissingFileError

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
}
_SUFFIXES = (".gz", ".xz", ".zst", ".bz2")


class ByteReader:
    """Reads a file as plain bytes, decompressing gzip, xz, bzip2 and zstd.

    The compression is recognized by the first bytes of the file, not by its name. Zstandard needs Python 3.14 or
    the package ``zstandard``.

    Parameters
    ----------
    path : path-like
        The file.

    Attributes
    ----------
    path : Path
        The file.
    size : int
        Bytes of the file as it lies on disk, compressed or not.

    Raises
    ------
    MissingFileError
        No such file.
    FormatError
        A folder, or zstd data where no module decodes it; while reading: damaged or truncated compressed
        data.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._damage: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error, lzma.LZMAError)
        if not self.path.exists():
            raise MissingFileError(
                f"{self.path}: no such file. Check the path; the working folder is {Path.cwd()}.",
                path=self.path,
            )
        if self.path.is_dir():
            raise FormatError(f"{self.path} is a folder. Give the file that holds the edges.", path=self.path)
        self._raw = open(self.path, "rb", buffering=0)
        self.size = self.path.stat().st_size
        try:
            head = self._raw.read(6)
            self._raw.seek(0)
            kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
            self._file: IO[bytes] = self._decoder(kind)
        except BaseException:
            self._raw.close()
            raise

    def read(self, count: int) -> bytes:
        """Return the next bytes, fewer than `count` only near the end, none at the end."""
        try:
            return self._file.read(count)
        except EOFError as error:
            raise FormatError(
                f"{self.path} ends within its compressed data: it was not copied whole. Copy it again.",
                path=self.path,
            ) from error
        except self._damage as error:
            raise FormatError(
                f"{self.path}: damaged compressed data ({error}). Copy the file again.", path=self.path
            ) from error
        except OSError as error:
            # bz2 reports damaged data so, without an errno.
            if error.errno is None:
                raise FormatError(
                    f"{self.path}: damaged compressed data ({error}). Copy the file again.", path=self.path
                ) from error
            raise

    def position(self) -> int:
        """Return how many of the `size` bytes on disk have been consumed."""
        return self._raw.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._raw.close()

    def __enter__(self) -> "ByteReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decoder(self, kind: str) -> IO[bytes]:
        if kind == "gzip":
            return cast(IO[bytes], gzip.GzipFile(fileobj=self._raw, mode="rb"))
        if kind == "xz":
            return cast(IO[bytes], lzma.LZMAFile(self._raw))
        if kind == "bzip2":
            return cast(IO[bytes], bz2.BZ2File(self._raw))
        if kind == "zstd":
            return self._zstd()
        return self._raw

    def _zstd(self) -> IO[bytes]:
        for name in ("compression.zstd", "zstandard"):
            try:
                module: Any = importlib.import_module(name)
            except ImportError:
                continue
            self._damage = (*self._damage, module.ZstdError)
            decoder = module.ZstdDecompressor()
            frame = decoder.decompressobj if name == "zstandard" else module.ZstdDecompressor
            return io.BufferedReader(_Zstd(self._raw, frame), 1 << 20)
        raise FormatError(
            f"{self.path} is compressed with zstd, which this Python does not read. "
            f"`pip install zstandard`, use Python 3.14 or newer, or unpack it first: zstd -d {self.path}",
            path=self.path,
        )


class _Zstd(io.RawIOBase):
    """Decompresses all frames; unlike zstandard's own reader it detects a truncated file."""

    def __init__(self, raw: io.FileIO, make: Callable[[], Any]) -> None:
        self._raw = raw
        self._make = make
        self._frame: Any = None
        self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            if self._frame is not None and self._frame.eof:
                data, self._frame = self._frame.unused_data or self._raw.read(1 << 16), None
            else:
                data = self._raw.read(1 << 16)
            if not data:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._frame = self._make()
            self._plain = self._frame.decompress(data)
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count


def plain_name(path: Path) -> str:
    """Return the lower-case name of a file without the suffix of its compression."""
    name = path.name.lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name
