"""Launches in processes of their own: the first action of a program, Ctrl-C, forks; and what a launch refuses."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run a program, which must end by itself and well, and return what it printed."""
    script = folder / "program.py"  # a file: the code of what is typed in is not kept on disk
    script.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=100, check=False, cwd=folder
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


FIRST = """
    import sys
    import numpy as np
    import warpwell as ww

    @ww.kernel
    def ask(x):
        i = ww.grid(1)
        if ww.failed():
            return
        x[i] = 1

    x = np.zeros(4)
    if sys.argv[1] == "scheduler":
        with ww.scheduler.Scheduler() as scheduler:
            scheduler.submit(ask[4], x).result()
    elif sys.argv[1] == "pool":
        with ww.devices()[0]:
            ask[4](x)
            ww.devices()[0].synchronize()
    else:
        ask[4](x, device=sys.argv[1])
    print(x.tolist())
"""


@pytest.mark.parametrize("where", ["cpu", "interp", "scheduler", "pool"])
def test_failed_may_be_the_first_thing_that_a_process_asks(tmp_path: Path, where: str) -> None:
    assert run(tmp_path, FIRST, where) == "[1.0, 1.0, 1.0, 1.0]\n"


STUCK = """
    import os, signal, threading, time
    import numpy as np
    import warpwell as ww

    @ww.kernel
    def spin(x):
        while x[0] == 0:
            if ww.failed():
                x[1 + ww.grid(1)] += 1
                return

    stuck, other = np.zeros(5, np.int64), np.zeros(5, np.int64)
    def interrupt():
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    spin[1](np.ones(1, np.int64))  # compiled now, so the interrupt comes in the middle of the launch
    beside = threading.Thread(target=lambda: spin[4](other))
    beside.start()
    threading.Thread(target=interrupt).start()
    try:
        spin[4](stuck)
    except KeyboardInterrupt:
        print("interrupted", stuck.tolist())
    print("beside", other.tolist())
    other[0] = 1
    beside.join()
    print("beside", other.tolist())
"""


def test_ctrl_c_ends_a_loop_that_asks_and_that_of_no_other_launch(tmp_path: Path) -> None:
    assert run(tmp_path, STUCK).splitlines() == [
        "interrupted [0, 1, 1, 1, 1]",
        "beside [0, 0, 0, 0, 0]",
        "beside [1, 0, 0, 0, 0]",
    ]
