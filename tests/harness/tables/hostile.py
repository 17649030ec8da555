"""Change words of an Arrow file, and read each copy: ``python -m tests.harness.tables.hostile PATH SEED N``.

Each changed file is read right, in parts, or raises a `WarpwellError`; anything else ends the process.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np

import warpwell as ww
from warpwell.errors import WarpwellError

VALUES = (0, 1, -1, 7, 1 << 16, (1 << 31) - 1, -(1 << 31), 1 << 40, -(1 << 40), (1 << 63) - 1, -(1 << 63))


def read(path: Path) -> str:
    """Read all columns of a file in every way; return what came of it."""
    try:
        with ww.table.open(path) as t:
            assert 0 <= t.rows <= 1 << 62
            refused = 0
            for number in range(len(t.names)):
                try:
                    column = t[number]
                    for run in column.runs:
                        for extent in run.extents:
                            assert 0 <= extent.offset and extent.offset + extent.nbytes <= extent.file.nbytes
                            extent.numpy().tobytes()
                    if t.rows < 1 << 20:
                        found = column.arrow()
                        assert len(found) == t.rows
                        if any(run.offsets or run.views or run.codes for run in column.runs):
                            found.to_pylist()
                except WarpwellError:
                    refused += 1
            return "refused in part" if refused else "read"
    except WarpwellError:
        return "refused"


def main(path: Path, seed: int, count: int) -> None:
    """Read `count` changed copies of a file."""
    raw = path.read_bytes()
    rng = np.random.default_rng(seed)
    found: Counter[str] = Counter()
    damaged = path.with_suffix(".hostile")
    for _ in range(count):
        size = int(rng.choice([1, 4, 8]))
        at = int(rng.integers(0, len(raw) // size)) * size
        value = VALUES[rng.integers(len(VALUES))] if size > 1 else int(rng.integers(256))
        word = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        changed = raw[:at] + word + raw[at + size :]
        if rng.random() < 0.1:
            changed = changed[: int(rng.integers(len(changed)))]
        damaged.write_bytes(changed)
        found[read(damaged)] += 1
    print(dict(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
