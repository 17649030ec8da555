"""`ww.gather` on `interp`: the rows that NumPy has, also those that kernels have changed."""

from pathlib import Path

import numpy as np
import pytest
from tests.harness.arrays.kernels import write

import warpwell as ww
from warpwell import errors


@pytest.mark.parametrize("tier", ["storage", "host", "device"])
def test_rows_are_those_that_numpy_has(tmp_path: Path, tier: str) -> None:
    model = np.arange(600).reshape(200, 3)
    np.save(tmp_path / "a.npy", model)
    rows = np.random.default_rng(0).integers(0, 200, 40)
    with ww.open(tmp_path / "a.npy", "r+", device="interp", tier=tier, cache="8KiB", page_size=512) as a:
        task = ww.gather(a, rows)
        assert task.done() and (task.result() == model[rows]).all()
        write[2](a.reshape(600), np.array([3, 599]), np.array([-1, -2]), device="interp")
        assert ww.gather(a, [1, 199]).result().tolist() == [[-1, 4, 5], [597, 598, -2]]
        with pytest.raises(errors.IndexRangeError, match="row 200 at position 1"):
            ww.gather(a, [0, 200]).result()
        assert [batch.tolist() for batch in ww.rows(a, [[0], [1]])] == [[[0, 1, 2]], [[-1, 4, 5]]]
