"""A GPU that leaves a running program and joins it again; its agent is in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.harness.pool_agents import spare_pool
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell.pool.agent.memory_pool import MemoryPool
from warpwell.pool.agent.spare import SpareDevice
from warpwell.pool.devices import runtime_for
from warpwell.pool.launch.reservation import FOLDER, users

NBYTES = 1 << 30


@ww.kernel
def double(x):
    i = ww.gpu.grid(1)
    x[i] = 2 * x[i]


def test_a_gpu_leaves_without_its_buffers_and_joins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    spares = [
        SpareDevice("cuda", "GPU-0", lambda: runtime_for("cuda")),
        SpareDevice("cpu", None, lambda: runtime_for("cpu")),
    ]
    with spare_pool(spares) as (devices, _):
        with devices.lease(target="cpu", timeout=HANG_SECONDS) as cpu:
            survivor = cpu[0].to_device(np.arange(1000))
        for _ in range(3):
            with devices.lease(target="cuda", timeout=HANG_SECONDS) as lease:
                x = lease[0].zeros(NBYTES, np.uint8)
                y = lease[0].to_device(survivor)
                double[1000](y)
                lease[0].synchronize()
                pool = MemoryPool._all[0]
                assert pool.reserved >= NBYTES
                assert np.array_equal(y.copy_to_host(), 2 * np.arange(1000))
                assert list(users(["GPU-0"])) == ["GPU-0"]
            del x, y
            lease[0].leave(HANG_SECONDS)
            assert not users(["GPU-0"])
            until(lambda: MemoryPool._all[0].reserved < NBYTES)  # other processes may use the GPU: look at the pool
        assert np.array_equal(survivor.copy_to_host(), np.arange(1000))
