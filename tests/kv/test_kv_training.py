"""Training from a store gives the losses of training from memory, through kills and changing numbers of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from lab.campaigns import kv_training
from lab.campaigns.kv_ranks import Run, Step, steps_of


@pytest.mark.slow
def test_curves_are_equal_through_kills(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits come from scikit-learn")
    run = Run(str(tmp_path / "digits.kv"), str(tmp_path), batch=128, epochs=3, seed=5, every=3)
    results = kv_training.compare(tmp_path, run, worlds=(2, 1), kills=2)
    assert [result.run for result in results] == [
        "one process, from the store",
        "2 ranks as processes",
        "1 rank as processes",
        "killed and resumed",
    ]
    assert [result.different for result in results] == [None] * 4
    assert [result.steps for result in results] == [45] * 4
    killed = results[-1]
    assert (killed.kills, killed.worlds, len(killed.resumed_at)) == (2, (2, 1, 2), 2)


def test_differences_are_told(tmp_path: Path) -> None:
    right = [Step(k, 0, float(k).hex(), (k, k + 1)) for k in range(5)]
    assert kv_training.difference([*right, right[2]], right) is None
    for wrong, message in [
        (replace(right[2], loss=(2.0 + 2**-51).hex()), "step 2 has loss"),
        (replace(right[3], ids=(4, 3)), "other samples"),
        (replace(right[4], number=5), "step 5 of 5"),
        (replace(right[1], epoch=1), "other samples"),
    ]:
        assert message in str(kv_training.difference([*right, wrong], right))
    assert kv_training.difference(right[:3] + right[4:], right) == "step 3 is missing"
    (tmp_path / "steps.txt").write_text("0 0 0x1p0 1,2\n1 0 0x1p")
    assert steps_of(tmp_path) == [Step(0, 0, "0x1p0", (1, 2))]


@pytest.mark.parametrize("options", [["--batch", "6", "--ranks", "4"], ["--kills", "-1"], ["--epochs", "0"]])
def test_options_that_cannot_be(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kv_training.main(options)
    assert ended.value.code == 2 and "--" in capsys.readouterr().err
