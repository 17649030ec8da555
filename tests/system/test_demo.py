"""The demo runs to its end, with a small graph, and draws its plot."""

import importlib
import json
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEMO)
    demo = importlib.import_module("demo")
    picture = tmp_path / "demo.png"
    options = ("--device", "cpu", "--scale", 11, "--cache", "16KiB", "--out", picture)
    assert demo.main([*map(str, options), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"]
    assert report["bfs"]["edge_bytes"] > 8 * report["bfs"]["cache_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert demo.main([*map(str, options)]) == 0
    text = capsys.readouterr().out
    assert "gpu.atomic_add(degree, edges[i], 1)" in text
    assert "read over wanted" in text and "bit for bit" in text
    losses, query = report["training"]["losses"], report["query"]
    assert min(losses[3:]) < 0.8 * losses[0]
    assert 0 < query["rows"] and 0 < query["bytes_wanted"] <= query["bytes_read"]
