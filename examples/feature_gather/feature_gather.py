"""Gather rows of a table of features that stays on storage, as a training loop does for its mini-batches.

Run it with ``python feature_gather.py``; it needs no input and no GPU.
"""

import tempfile
from pathlib import Path

import numpy as np

import warpwell as ww


def main():
    rng = np.random.default_rng(0)
    rows, width, batch = 20_000, 64, 256
    table = rng.standard_normal((rows, width), np.float32)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npy"
        np.save(path, table)
        del table
        with ww.open(path, cache="256KiB", page_size=512) as features:
            total = np.zeros(width)
            for _ in range(10):
                idx = rng.integers(0, rows, batch)
                got = ww.gather(features, idx).result()
                # a NumPy array on the cpu; on a GPU an array there, which torch.from_dlpack takes without a copy
                values = np.asarray(got)
                total += values.sum(axis=0, dtype=np.float64)
            stats = features.stats
        expected = np.load(path, mmap_mode="r")[idx]

    print(f"{rows:,} rows of {4 * width} bytes: {4 * rows * width:,} bytes behind a cache of 262,144")
    print(f"10 batches of {batch} rows: {stats.misses:,} misses, {stats.evictions:,} evictions")
    print(f"pages of 512 bytes: wanted {10 * batch * 4 * width:,} bytes, read {stats.bytes_read:,}")

    assert values.shape == (batch, width) and values.dtype == np.float32
    assert np.array_equal(values, expected)
    assert np.isfinite(total).all()
    assert stats.evictions > 0


if __name__ == "__main__":
    main()
