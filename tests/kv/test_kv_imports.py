"""The stress test of imports of image data sets, in brief."""

import random
from pathlib import Path

import numpy as np
import pytest

import warpwell as ww
from lab.campaigns import kv_imports

IMAGES = kv_imports.Images(60, 4, 7)


@pytest.mark.parametrize(("source", "kills"), [("tar", 1), pytest.param("hugging_face", 0, marks=pytest.mark.slow)])
def test_an_import(tmp_path: Path, source: str, kills: int) -> None:
    pytest.importorskip("pyarrow")
    result = kv_imports.import_through_kills(IMAGES, source, tmp_path, kills, random.Random(3))
    assert (result.wrong, result.records, result.kills) == (None, 60, kills)
    assert 1 < result.disk_share < (2.1 if kills else 1.05)  # a kill may leave 8 MiB that were not committed
    assert "are the same" in result.line()
    assert not list(tmp_path.iterdir())


def test_differences_are_found(tmp_path: Path) -> None:
    fields = {"image": [IMAGES.image(k) for k in range(60)], "label": [IMAGES.label(k) for k in range(60)]}
    fields["name"] = [IMAGES.name(k).partition(".")[0] for k in range(60)]
    schema = {"image": ("uint8", (None,)), "label": "int64", "name": "str"}
    for name, change, expected in (
        ("equal", {}, None),
        ("image", {"image": b""}, "another image 5"),
        ("label", {"label": 3}, "another label or name of image 5"),
        ("name", {"name": "x"}, "another label or name of image 5"),
    ):
        with ww.kv.create(tmp_path / name, schema=schema) as store:
            store.put_many(np.arange(60), fields)
            store[5] = {**{field: column[5] for field, column in fields.items()}, **change}
        difference = kv_imports.difference(IMAGES, "tar", tmp_path / name)
        assert difference is None if expected is None else expected in str(difference)
    with ww.kv.open(tmp_path / "equal", mode="r+") as store:
        del store[59]
    assert kv_imports.difference(IMAGES, "tar", tmp_path / "equal") == "has 59 records of 60"
    assert "metadata" in str(kv_imports.difference(kv_imports.Images(59, 4, 7), "folder", tmp_path / "equal"))
