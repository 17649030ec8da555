"""SmallFloatConformance: float16 and bfloat16 items in kernels, against NumPy and against their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from warpwell import errors
from warpwell.array import Array, create, open_array

from .kernels import PAGE, add, read, write

Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
EDGES = np.array(
    [0, 1, 2, 0x3FF, 0x400, 0x401, 0x3BFF, 0x3C00, 0x3C01, 0x7BFE, 0x7BFF, 0x7C00, 0x7C01, 0x7DFF, 0x7E00, 0x7FFF,
     0x7F, 0x80, 0x81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0], np.uint16,
)  # fmt: skip
EDGES = np.concatenate([EDGES, EDGES | 0x8000])


def half_values(bits: Bits) -> Floats:
    return bits.view(np.float16).astype(np.float32)


def bfloat_values(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearest_half(values: Floats) -> Bits:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def nearest_bfloat(values: Floats) -> Bits:
    """The definition: of the two bfloat16 around a number the nearer, of two as near the even one."""
    low = (values.view(np.uint32) >> 16).astype(np.uint16)
    out = low.copy()
    for k, value in enumerate(values.tolist()):
        if np.isfinite(value) and (values.view(np.uint32)[k] & 0xFFFF):
            high = low[k] + 1
            above = 2.0**128 if high & 0x7FFF == 0x7F80 else abs(float(bfloat_values(np.array([high], np.uint16))[0]))
            below = abs(float(bfloat_values(low[k : k + 1])[0]))
            up, down = above - abs(value), abs(value) - below
            if up < down or (up == down and high & 1 == 0):
                out[k] = high
    out[np.isnan(values)] |= 0x40
    return out


KINDS: dict[str, tuple[Any, Any]] = {
    "float16": (half_values, nearest_half),
    "bfloat16": (bfloat_values, nearest_bfloat),
}


def same(kind: str, found: Bits, model: Bits) -> None:
    """Compare bits; a NaN of the model must be a NaN of the same sign."""
    nan = np.isnan(KINDS[kind][0](model))
    np.testing.assert_array_equal(found[~nan], model[~nan])
    assert np.isnan(KINDS[kind][0](found[nan])).all()
    np.testing.assert_array_equal(found[nan] & 0x8000, model[nan] & 0x8000)


class SmallFloatConformance:
    """Tests that hold on every device.

    Attributes
    ----------
    DEVICE : {"cpu", "cuda", "interp"}
    ALL : bool
        Whether there is time for all 65536 items.
    """

    DEVICE = "cpu"
    ALL = True

    def bits(self) -> Bits:
        if self.ALL:
            return np.arange(1 << 16).astype(np.uint16)
        return np.concatenate([EDGES, np.random.default_rng(1).integers(0, 1 << 16, 60).astype(np.uint16)])

    def open(self, path: Path, kind: str, mode: str = "r", **options: Any) -> Array:
        options = {"cache": 4 * (PAGE + 8), "page_size": PAGE, "tier": "storage", **options}
        return open_array(path, mode, dtype=kind, device=self.DEVICE, **options)

    def read(self, a: Array) -> Floats:
        out = np.zeros(a.size, np.float32)
        read[a.size](a, np.arange(a.size), out, device=self.DEVICE)
        return out

    def write(self, a: Array, values: Any) -> None:
        write[a.size](a, np.arange(a.size), values, device=self.DEVICE)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_item_is_read_exactly(self, tmp_path: Path, kind: str) -> None:
        bits = self.bits()
        bits.tofile(tmp_path / "raw")
        with self.open(tmp_path / "raw", kind) as a:
            values = self.read(a)
        model = KINDS[kind][0](bits)
        nan = np.isnan(model)
        np.testing.assert_array_equal(values.view(np.uint32)[~nan], model.view(np.uint32)[~nan])
        assert np.isnan(values[nan]).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_item_is_written_back_as_it_was(self, tmp_path: Path, kind: str) -> None:
        bits = self.bits()
        with create(tmp_path / "a.npy", bits.size, kind, device=self.DEVICE) as a:
            self.write(a, KINDS[kind][0](bits))
        same(kind, np.fromfile(tmp_path / "a.npy", np.uint16)[-bits.size :], bits)

    @pytest.mark.parametrize("kind", KINDS)
    def test_numbers_between_go_to_the_nearest(self, tmp_path: Path, kind: str) -> None:
        """All those just above and below the middle of two items, and in it, and as many at random."""
        middles = EDGES.astype(np.uint32) << 16
        sorted_halves = np.sort(half_values(EDGES[EDGES < 0x7C00]))
        halves = ((sorted_halves[1:] + sorted_halves[:-1]) / 2).view(np.uint32)
        hard = [int(m) + d for m in [*(middles | 0x8000), *halves] for d in (-1, 0, 1)]
        bits = [*hard, *np.random.default_rng(5).integers(0, 2**32, len(hard))]
        values = np.array(bits, np.uint32).view(np.float32)
        with create(tmp_path / "a.npy", values.size, kind, device=self.DEVICE) as a:
            self.write(a, values)
            same(kind, np.asarray(a[:]).view(np.uint16), KINDS[kind][1](values))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("how", [{"offset": 1}, {"tier": "host"}, {"offset": 3, "tier": "host"}])
    def test_items_anywhere_in_any_tier(self, tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
        bits = EDGES[:40]
        (tmp_path / "raw").write_bytes(b"\xaa" * how.get("offset", 0) + bits.tobytes())
        with self.open(tmp_path / "raw", kind, "r+", shape=40, **how) as a:
            np.testing.assert_array_equal(self.read(a), KINDS[kind][0](bits))
            self.write(a, KINDS[kind][0](bits[::-1].copy()))
        same(kind, np.frombuffer((tmp_path / "raw").read_bytes()[how.get("offset", 0) :], np.uint16), bits[::-1])

    @pytest.mark.parametrize("kind", KINDS)
    def test_additions_are_refused(self, tmp_path: Path, kind: str) -> None:
        with create(tmp_path / "a.npy", 4, kind, device=self.DEVICE) as a:
            with pytest.raises(Exception, match=f"atomic_add takes aligned 4- and 8-byte .* not {kind}"):
                add[1](a, np.zeros(1, np.int64), np.zeros(1, np.float32), device=self.DEVICE)

    def test_the_host_sees_bits_of_bfloat16(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
        with create(tmp_path / "a.npy", 6, "bfloat16", device=self.DEVICE) as a:
            assert a.dtype == np.uint16 and "(6,) bfloat16 on" in repr(a)
            with pytest.raises(errors.DTypeError, match=r"are bfloat16, .* assign their bits as uint16, or install"):
                a[1] = 1.5
            a[1:3] = np.array([0x3FC0, 0xBF80], np.uint16)
            assert self.read(a.reshape(2, 3).reshape(6)).tolist() == [0, 1.5, -1, 0, 0, 0]
            assert a[1] == 0x3FC0 and np.asarray(a[:3]).dtype.metadata is None
        with open_array(tmp_path / "a.npy", device=self.DEVICE) as a, pytest.raises(Exception, match="items of"):
            self.read(a)
        np.save(tmp_path / "b.npy", np.zeros(4, np.float32))
        with pytest.raises(errors.DTypeError, match="items of float32, not of bfloat16"):
            open_array(tmp_path / "b.npy", dtype="bfloat16", device=self.DEVICE)

    def test_the_host_uses_ml_dtypes_where_it_is_installed(self, tmp_path: Path) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        np.save(tmp_path / "a.npy", np.array([0, 1.5, -1], ml_dtypes.bfloat16))
        with open_array(tmp_path / "a.npy", "r+", dtype=ml_dtypes.bfloat16, device=self.DEVICE) as a:
            assert a.dtype == ml_dtypes.bfloat16
            assert self.read(a).tolist() == [0, 1.5, -1]
            a[1] = 3.14
            assert float(a[1]) == float(ml_dtypes.bfloat16(3.14))
            assert np.asarray(a[:]).dtype == ml_dtypes.bfloat16
