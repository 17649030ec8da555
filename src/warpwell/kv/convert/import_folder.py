"""A folder of files, each a value, or a folder of classes of images: ``FolderSource``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, FormatError
from .sources import IMAGE, Batch, Record, Source, as_text, in_batches, read_value

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of images, the same as in torchvision's ``ImageFolder``."""

DATA_SETS = (".parquet", ".arrow", ".tar", ".lance", ".mdb")
"""Suffixes of files that are hardly meant as values."""

LAYOUTS = ("classes", "files")


class FolderSource(Source):
    """Files at any depth, in the order of their paths: the values of a store, or images in a folder for each class.

    In a folder of classes (ROOT/CLASS/FILE), the label is the position of CLASS among all classes in alphabetical
    order, as in torchvision's ``ImageFolder``, and the name is the path in ROOT. Hidden files and folders, and loose
    files in ROOT, are skipped. Links to folders are followed there, and nowhere else.

    Parameters
    ----------
    path : pathlib.Path
        The folder.
    rule : str, optional
        One of `KEY_RULES`; names are paths relative to the folder, with ``/``. By default images are numbered, and
        other files have names.
    layout : {"classes", "files"}, optional
        By default a folder whose folders hold nothing but images is one of classes.

    Raises
    ------
    FormatError
        There is no file in it, a class has no image, folders form a loop, or it is not clear what the classes are.
    """

    def __init__(self, path: Path, rule: str | None, layout: str | None = None) -> None:
        if layout not in (None, *LAYOUTS):
            raise ArgumentError(f"layout is {layout!r}: choose one of {', '.join(LAYOUTS)}", name="layout")
        with os.scandir(path) as entries:
            shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
        self.path = path
        self._classes = [entry.name for entry in shown if entry.is_dir()]
        loose = [entry.name for entry in shown if not entry.is_dir()]
        self.kind = "classes" if layout == "classes" or (layout is None and self._holds_classes(loose)) else "folder"
        super().__init__(path, rule or ("name" if self.kind == "folder" else "number"))
        # names alone take far less than the values, and their number gives the time left
        if self.kind == "folder":
            self.records = self._count_files(layout)
            return
        self.schema = {"image": IMAGE, "label": "int64", "name": "str"}
        self.classes = {"label": self._classes}
        self.skipped += loose
        self.records = sum(map(self._count_images, self._classes))
        if not self.records:
            raise FormatError(f"{path} holds no folder of images: check the path", path=path)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Read all files; raise an error if a file grows over the limit or vanishes during the load."""
        return in_batches(self._records(start), self, start)

    def _records(self, start: int) -> Iterator[Record]:
        labels = {name: label for label, name in enumerate(self._classes)}
        for number, file in enumerate(self._files()):
            if number < start:
                continue
            data = read_value(file)
            name = file.relative_to(self.path).as_posix()
            raw = os.fsencode(name)
            value: Any = data
            if self.schema is not None:
                value = {"image": data, "label": labels[name.partition("/")[0]], "name": as_text(raw, self.where)}
            yield Record(raw, value, len(data), (number + 1) / self.records)

    def _files(self) -> Iterator[Path]:
        if self.schema is None:
            return _walk(self.path)
        files = (file for name in self._classes for file in _walk(self.path / name, ()))
        return (file for file in files if _is_image(file))

    def _count_files(self, layout: str | None) -> int:
        count = 0
        for file in _walk(self.path):
            count += 1
            if layout is None and file.suffix in DATA_SETS:
                raise FormatError(
                    f"{self.path} holds data sets ({file.relative_to(self.path)}): give their files, or use --layout "
                    "files to store each file as a value",
                    path=self.path,
                )
        if not count:
            raise FormatError(f"{self.path} holds no file: check the path", path=self.path)
        return count

    def _count_images(self, name: str) -> int:
        count = 0
        for file in _walk(self.path / name, ()):
            if _is_image(file):
                count += 1
            elif not file.name.startswith("."):
                self.skipped.append(file.relative_to(self.path).as_posix())
        if not count:
            raise FormatError(
                f"{self.path}: the folder {name} holds no image: remove it, or use --layout files", path=self.path
            )
        return count

    def _holds_classes(self, loose: list[str]) -> bool:
        """Return whether the folders in this folder hold nothing but images."""
        count, is_split = 0, True
        for name in self._classes:
            for file in _walk(self.path / name, ()):
                if not _is_image(file) and not file.name.startswith("."):
                    if any(map(_is_image, _walk(self.path / name, ()))):
                        odd_file = file.relative_to(self.path)
                        self.note = (
                            f"each file is a value, because {odd_file} is not an image; --layout classes skips it"
                        )
                    return False
                count += 1
                is_split = is_split and file.parent != self.path / name
        images = [name for name in loose if name.lower().endswith(IMAGES)]
        problem = ""
        if count and is_split:
            problem = f"{self.path} holds folders of folders of images: give one of {', '.join(self._classes[:5])}"
        elif count and images:
            problem = f"{self.path} holds folders of images and the loose image {images[0]}: move it into a folder"
        if problem:
            raise FormatError(f"{problem}, or choose --layout classes or --layout files", path=self.path)
        return count > 0


def _is_image(file: Path) -> bool:
    return file.name.lower().endswith(IMAGES) and not file.name.startswith(".")


def _walk(folder: Path, above: tuple[str, ...] | None = None) -> Iterator[Path]:
    """Yield the files of a folder in the order of their paths.

    With `above`, the real paths of the folders above it, links to folders are followed.
    """
    follow = above is not None
    if above is not None:
        real = os.path.realpath(folder)
        if real in above:
            raise FormatError(f"{folder} is a link to a folder that contains it: remove the link", path=folder)
        above = (*above, real)
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    for entry in listed:
        if entry.is_dir(follow_symlinks=follow):
            yield from _walk(Path(entry.path), above)
        elif entry.is_file():
            yield Path(entry.path)
        elif not entry.is_dir():
            raise FormatError(f"{entry.path} is a broken link, a pipe or a device: remove it", path=entry.path)
