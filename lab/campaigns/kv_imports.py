"""Imports of image data sets, through kills: ``python -m lab campaign kv_imports``.

The same generated images are written as a folder of classes, WebDataset archives, a Parquet file, a data set of Hugging
Face and an LMDB environment. ``warpwell kv load`` imports each one, is killed (SIGKILL) at random moments and continued
with ``--append``. Then all records are compared, byte for byte, and one more ``--append`` must add nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from warpwell import kv

SMALLEST, LARGEST = 2_000, 200_000
"""Bytes of an image."""

_BATCH = 64


@dataclass(frozen=True)
class Images:
    """Generated images, in the order of their classes.

    Attributes
    ----------
    count, classes, seed : int
    """

    count: int
    classes: int
    seed: int

    def size(self, number: int) -> int:
        """Return the bytes of an image."""
        return int(np.random.default_rng((self.seed, 0, number)).integers(SMALLEST, LARGEST + 1))

    def image(self, number: int) -> bytes:
        """Return an image: random bytes."""
        return np.random.default_rng((self.seed, 1, number)).bytes(self.size(number))

    def label(self, number: int) -> int:
        """Return the number of its class."""
        return number * self.classes // self.count

    def class_name(self, label: int) -> str:
        """Return the name of a class, in the form of ImageNet's."""
        return f"n{10_000_000 + label}"

    def name(self, number: int) -> str:
        """Return the path of an image in its folder of classes."""
        name = self.class_name(self.label(number))
        return f"{name}/{name}_{number:07}.JPEG"

    @property
    def nbytes(self) -> int:
        """Bytes of all images."""
        return sum(map(self.size, range(self.count)))

    def groups(self, count: int = _BATCH) -> Iterator[range]:
        """Yield the numbers of all images, some at a time."""
        return (range(start, min(start + count, self.count)) for start in range(0, self.count, count))


# -- sources -----------------------------------------------------------------------------------------------------------


def write_folder(images: Images, path: Path) -> Path:
    """Write ROOT/CLASS/FILE."""
    for label in range(images.classes):
        (path / images.class_name(label)).mkdir(parents=True)
    for number in range(images.count):
        (path / images.name(number)).write_bytes(images.image(number))
    return path


def write_tar(images: Images, path: Path) -> Path:
    """Write four archives of samples: an image, its label and its name as text."""
    path.mkdir()
    for shard, numbers in enumerate(np.array_split(np.arange(images.count), 4)):
        with tarfile.open(path / f"train-{shard:06}.tar", "w") as archive:
            for number in map(int, numbers):
                parts = {"jpg": images.image(number), "cls": b"%d" % images.label(number)}
                for extension, data in parts.items():
                    member = tarfile.TarInfo(f"{images.name(number).partition('.')[0]}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return path


def write_parquet(images: Images, path: Path) -> Path:
    """Write columns of bytes, labels and names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = path.with_suffix(".parquet")
    schema = pa.schema({"image": pa.binary(), "label": pa.int64(), "name": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for numbers in images.groups(1000):
            writer.write_table(
                pa.table(
                    [
                        [images.image(number) for number in numbers],
                        [images.label(number) for number in numbers],
                        [images.name(number) for number in numbers],
                    ],
                    schema=schema,
                )
            )
    return path


def write_hugging_face(images: Images, path: Path) -> Path:
    """Write the same files as ``Dataset.save_to_disk`` for an Image and a ClassLabel feature."""
    import pyarrow as pa

    path.mkdir()
    names = [images.class_name(label) for label in range(images.classes)]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema({"image": kind, "label": pa.int64()}, metadata=metadata)
    files = []
    for shard, numbers in enumerate(np.array_split(np.arange(images.count), 3)):
        files.append({"filename": f"data-{shard:05}-of-00003.arrow"})
        with pa.ipc.new_stream(path / files[-1]["filename"], schema) as writer:
            for start in range(0, len(numbers), _BATCH):
                rows = [int(number) for number in numbers[start : start + _BATCH]]
                cells = [{"bytes": images.image(row), "path": images.name(row)} for row in rows]
                writer.write_batch(pa.record_batch([pa.array(cells, kind), [images.label(r) for r in rows]], schema))
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_indices_files": None}))
    (path / "dataset_info.json").write_text(json.dumps({"features": features}))
    return path


def write_lmdb(images: Images, path: Path) -> Path:
    """Write an environment: names as keys, images as values."""
    import lmdb

    with lmdb.open(str(path), map_size=2 * images.nbytes + (64 << 20)) as environment:
        for numbers in images.groups(1000):
            with environment.begin(write=True) as transaction:
                for number in numbers:
                    transaction.put(images.name(number).encode(), images.image(number))
    return path


SOURCES: dict[str, Callable[[Images, Path], Path]] = {
    "folder": write_folder,
    "tar": write_tar,
    "parquet": write_parquet,
    "hugging_face": write_hugging_face,
    "lmdb": write_lmdb,
}


# -- imports -----------------------------------------------------------------------------------------------------------


@dataclass
class Import:
    """The outcome of an import.

    Attributes
    ----------
    source : str
    records : int
    kills : int
        Kills of the command, each in the middle of its work.
    survived : list of int
        Records in the store after each kill.
    wrong : str or None
        The first difference.
    disk_share : float
        Disk blocks of the store, as a share of the bytes of the images.
    seconds : float
        Time of an import without kills.
    megabytes_per_second : float
    memory_bytes : int
        Peak of the private memory of that import, sampled.
    """

    source: str
    records: int
    kills: int
    survived: list[int]
    wrong: str | None
    disk_share: float
    seconds: float
    megabytes_per_second: float
    memory_bytes: int

    def line(self) -> str:
        """Return the outcome as a line of text."""
        return (
            f"{self.source}: {self.records:,} records {self.wrong or 'are the same'}, after {self.kills} kills with "
            f"{self.survived} records; disk {self.disk_share:.4f} of the images; {self.seconds:.1f} s, "
            f"{self.megabytes_per_second:.0f} MB/s, {self.memory_bytes >> 20} MiB of memory without kills"
        )


def import_through_kills(images: Images, source: str, folder: Path, kills: int, rng: random.Random) -> Import:
    """Import a source without kills, and again with kills; compare the records of the second store."""
    path = SOURCES[source](images, folder / source)
    store = folder / f"{source}.kv"
    process, seconds, memory = _run(path, store)
    wrong = None if process.returncode == 0 else process.stderr.decode()
    shutil.rmtree(store, ignore_errors=True)
    survived: list[int] = []
    while len(survived) < kills and wrong is None:
        held = _blocks(store)
        until = held + rng.uniform(0, 2) * (images.nbytes - held) / (1 + kills - len(survived))
        process, _, _ = _run(path, store, "--append", kill_at=until)
        if process.returncode != -signal.SIGKILL:
            wrong = process.stderr.decode() if process.returncode else None
            break
        survived.append(_records(store))
    for _ in range(2 if wrong is None else 0):  # the second append must add nothing
        process, _, _ = _run(path, store, "--append")
        wrong = wrong or (process.stderr.decode() if process.returncode else None)
    added = json.loads(process.stdout)["records_read"] if wrong is None else 0
    wrong = wrong or (f"added {added} records again" if added else difference(images, source, store))
    used = _blocks(store)
    shutil.rmtree(store, ignore_errors=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    rate = images.nbytes / seconds / 1e6
    return Import(source, images.count, len(survived), survived, wrong, used / images.nbytes, seconds, rate, memory)


def _blocks(store: Path) -> int:
    """Return the bytes of the disk blocks of a store."""
    nbytes = 0
    for file in store.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # files are replaced during a load
            nbytes += file.stat().st_blocks * 512
    return nbytes


def _run(
    path: Path, store: Path, *options: str, kill_at: float | None = None
) -> tuple[subprocess.CompletedProcess[bytes], float, int]:
    """Run ``warpwell kv load``; return its result, its seconds and its peak memory.

    Kill it once the store has `kill_at` bytes on disk.
    """
    command = [sys.executable, "-m", "warpwell", "kv", "load", str(path), str(store), "--json", *options]
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(command, stdout=out, stderr=err)
        memory = 0
        while child.poll() is None:
            if kill_at is not None and _blocks(store) > kill_at:
                child.kill()
            # private memory, without mapped files of a source
            with contextlib.suppress(OSError):  # the process may have ended
                status = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                memory = max(memory, *(int(line.split()[1]) << 10 for line in status if line[:7] == "RssAnon"), 0)
            time.sleep(0.005)
        out.seek(0)
        err.seek(0)
        result = subprocess.CompletedProcess(command, child.returncode, out.read(), err.read())
    return result, time.monotonic() - started, memory


def _records(store: Path) -> int:
    """Return the records of a store after a kill; -1 if it was not complete yet."""
    if not (store / "MANIFEST").exists():
        return -1
    with kv.open(store) as opened:
        return len(opened)


def difference(images: Images, source: str, path: Path) -> str | None:
    """Return the first difference of a store from the images, or None."""
    with kv.open(path) as store:
        if len(store) != images.count:
            return f"has {len(store)} records of {images.count}"
        classes = [images.class_name(label) for label in range(images.classes)]
        if source in ("folder", "hugging_face") and store.metadata != {"classes": {"label": classes}}:
            return f"has the metadata {store.metadata}"
        for numbers in images.groups():
            names = [images.name(number) for number in numbers]
            keys: Any = [name.encode() for name in names] if source == "lmdb" else np.array(numbers)
            batch, found = store.get_many(keys)
            if not found.all():
                return f"lacks the record {keys[int(found.argmin())]!r}"
            columns = {"image": batch} if source == "lmdb" else batch
            if source == "tar":
                names = [name.partition(".")[0] for name in names]
            for k, number in enumerate(numbers):
                if bytes(columns["image"][k]) != images.image(number):
                    return f"has another image {number}"
                if source != "lmdb" and (columns["label"][k], columns["name"][k]) != (images.label(number), names[k]):
                    return f"has another label or name of image {number}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 1 if a record differs or a store takes more than 1.05 times the bytes of the images."""
    parser = argparse.ArgumentParser(prog="python -m lab campaign kv_imports", description=__doc__)
    number: Any = int
    parser.add_argument("folder", type=Path, help="working folder, on a disk")
    parser.add_argument("--images", type=number, default=10_000, help="images (10000)")
    parser.add_argument("--classes", type=number, default=100, help="classes (100)")
    parser.add_argument("--kills", type=number, default=5, help="kills of each import (5)")
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=list(SOURCES), help="sources (all)")
    parser.add_argument("--seed", type=number, default=0, help="seed of images and kills (0)")
    parser.add_argument("--json", action="store_true", help="one JSON text instead of lines")
    options = parser.parse_args(arguments)
    images, rng = Images(options.images, options.classes, options.seed), random.Random(options.seed)
    imports = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for source in options.sources:
            imports.append(import_through_kills(images, source, Path(folder), options.kills, rng))
            if not options.json:
                print(imports[-1].line(), flush=True)
    if options.json:
        print(json.dumps({"seed": options.seed, "imports": [asdict(found) for found in imports]}))
    return int(any(found.wrong or found.disk_share > 1.05 for found in imports))
