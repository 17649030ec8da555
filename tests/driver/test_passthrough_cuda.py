"""Programs of CuPy, PyTorch, Triton and numba-cuda print the same with and without the pass-through driver."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.driver.gates import flipping
from tests.harness.until import HANG_SECONDS

from warpwell.driver import passthrough_environ

CUPY = """
import cupy, hashlib, numpy
kernel = cupy.RawKernel("extern C __global__ void mix(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x;"
    " if (i < n) for (int k = 0; k < 2000; k++) x[i] = x[i] * 1.0001f + 0.5f; }".replace("C", '"C"', 1), "mix")
streams = [cupy.cuda.Stream(non_blocking=k % 2 == 0) for k in range(20)]
parts = []
for k, stream in enumerate([cupy.cuda.Stream.null, *streams] * 5):
    with stream:
        x = cupy.arange(1 << 16, dtype=cupy.float32) + k
        kernel((256,), (256,), (x, numpy.int32(x.size)))
        event = stream.record()
        other = streams[k % len(streams)]
        other.wait_event(event)
        with other:
            parts.append(cupy.sort(x)[::100].copy())
        parts.append((x[:256].reshape(16, 16) @ x[256:512].reshape(16, 16)))
cupy.cuda.Device().synchronize()
print(hashlib.sha256(b"".join(part.get().tobytes() for part in parts)).hexdigest())
"""
TORCH = """
import hashlib, torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(14400, 10))
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images, labels = torch.randn(64, 3, 32, 32).pin_memory(), torch.randint(0, 10, (64,))
def step(x, y):
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
copies = torch.cuda.Stream()
for _ in range(100):
    with torch.cuda.stream(copies):
        x, y = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(copies)
    for used in (x, y):  # else the allocator gives its memory to a copy that does not wait for the step
        used.record_stream(torch.cuda.current_stream())
    loss = step(x, y)
print(loss.item())
still, graph, stream = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph):
    for _ in range(20):
        still = still * 1.5 + 1
for _ in range(50):
    graph.replay()
torch.cuda.synchronize()
data = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()) + still.cpu().numpy().tobytes()
print(hashlib.sha256(data).hexdigest())
"""
TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def add(x, y, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)
x, y = torch.arange(100_000, device="cuda"), torch.zeros(100_000, device="cuda", dtype=torch.int64)
for _ in range(300):
    add[(98,)](x, y, 100_000, block=1024)
print(int(y.sum()), torch.equal(y, 300 * x))
"""
NUMBA = """
import numpy
from numba import cuda
@cuda.jit
def add(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] += x[i]
x, y = cuda.to_device(numpy.arange(100_000)), cuda.to_device(numpy.zeros(100_000, numpy.int64))
for _ in range(1000):
    add[400, 256](x, y)
print(int(y.copy_to_host().sum()))
"""
PROGRAMS = {"cupy": CUPY, "torch": TORCH, "triton": TRITON, "numba": NUMBA}


def run(library: str, tmp_path: Path, environ: dict[str, str]) -> str:
    program = tmp_path / f"use_{library}.py"
    program.write_text(PROGRAMS[library])  # Triton reads the source of its kernels
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_program_prints_the_same_through_the_pass_through_and_under_gates(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    plain = run(library, tmp_path, dict(os.environ))
    assert run(library, tmp_path, passthrough_environ(os.environ)) == plain
    with flipping(tmp_path) as gates:
        shared = passthrough_environ(os.environ) | {"WARPWELL_SHARE": "0:test", "WARPWELL_TURNS": str(tmp_path)}
        assert run(library, tmp_path, shared) == plain
    assert gates.closings > 10 and gates.held > 0
