"""Random CUDA programs with layer, worker and fake driver under ThreadSanitizer, which prints the data races it sees.

    setarch -R python -m tests.harness.driver.races --seeds 0:40

Layer and worker are processes of their own, so races between them are not seen. The sanitizer does not know fences. It
knows only some ranges of addresses, so pinned memory and device memory are placed in one of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.harness.driver import natives
from tests.harness.until import HANG_SECONDS

from lab.driver.serve import serve
from warpwell.driver.build import compiler

FLAGS = ("-fsanitize=thread", "-fno-omit-frame-pointer", "-O1", "-Wno-tsan")
ADDRESSES: natives.Changes = {
    "calls.h": {
        "#define WW_PIN_LOWEST 0x200000000000ull": "#define WW_PIN_LOWEST 0x7e8000000000ull",
        "#define WW_PIN_HIGHEST 0x2f0000000000ull": "#define WW_PIN_HIGHEST 0x7ea000000000ull",
    },
    "worker.h": {
        "#define WW_ARENA_BASE 0x300000000000ull": "#define WW_ARENA_BASE 0x7ea000000000ull",
        "#define WW_ARENA_STEP (1ull << 40)": "#define WW_ARENA_STEP (1ull << 36)",
    },
}
PLANTED: natives.Changes = {
    "worker_links.c": {
        "WW_LOCK(&lock); if (l->arrived.n >= EARLY_MOST) return 0;": "if (l->arrived.n >= EARLY_MOST)"
        " { return 0; } WW_LOCK(&lock);",
    },
}
"""A length that a thread of the worker reads without the lock under which another thread changes it."""


def library() -> str | None:
    """Return the path of the sanitizer's library, or None if the compiler does not have it."""
    line = [*compiler(), "-print-file-name=libtsan.so"]
    path = subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    return path if os.path.isabs(path) else None


def main(arguments: list[str] | None = None) -> int:
    """Run the programs of a range of seeds in four threads; return 1 if one is wrong or a race was seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.driver.races", description=main.__doc__)
    parser.add_argument("--seeds", default="0:40", help="first and end")
    parser.add_argument("--tight", action="store_true", help="with limits that let all wait for room")
    parser.add_argument("--planted", action="store_true", help="with a race")
    options = parser.parse_args(arguments)
    parts = [ADDRESSES, *([natives.TIGHT] if options.tight else []), *([PLANTED] if options.planted else [])]
    with natives.changed(natives.merged(*parts), FLAGS) as built, serve(2, driver=built.fake) as server:
        line = [sys.executable, "-m", "tests.harness.driver.programs", "--devices", "2", "--threads", "4"]
        environ = {**server.environ(), "LD_PRELOAD": library() or ""}
        done = subprocess.run(
            [*line, "--seeds", options.seeds],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_SECONDS,
        )
    print(done.stdout, end="")
    return int(done.returncode != 0 or "ThreadSanitizer" in done.stdout)


if __name__ == "__main__":
    sys.exit(main())
