"""Native parts of the driver that differ from ours in a few places: smaller limits, sanitizers, planted faults."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from unittest import mock

from lab.driver import build as lab_build
from warpwell.driver import build, generate

Changes = Mapping[str, Mapping[str, str]]
"""File name -> text that occurs in it once -> replacement."""

TIGHT: Changes = {
    "worker_streams.c": {
        "#define MOST 512u": "#define MOST 5u",
        "#define MARK_EACH 64u": "#define MARK_EACH 2u",
    },
    "worker.h": {"#define WW_CELLS 256u": "#define WW_CELLS 4u"},
    "layer_copy.c": {
        "#define OUT_AHEAD 8u": "#define OUT_AHEAD 2u",
        "#define FEW_PLACES 16u": "#define FEW_PLACES 3u",
        "#define PART (2u << 20)": "#define PART (64u << 10)",
        "#define STREAMED (8u << 20)": "#define STREAMED (64u << 10)",
        "#define SMALL_PIECES (4u << 20)": "#define SMALL_PIECES (32u << 10)",
        "layer.many_cores ?": "true ?",
    },
    "layer_ring.c": {"#define AHEAD (16u << 20)": "#define AHEAD (64u << 10)"},
    "wire.h": {
        "#define WW_RING_BYTES (4u << 20)": "#define WW_RING_BYTES (128u << 10)",
        "#define WW_PLACES 64u": "#define WW_PLACES 6u",
        "#define WW_PLACE_BYTES (1u << 20)": "#define WW_PLACE_BYTES (16u << 10)",
    },
    "calls.h": {"#define WW_SMALL (16u << 10)": "#define WW_SMALL (1u << 10)"},
}
"""Limits at which each program parks calls, waits for room, places and slots, and wraps around all the time."""
PATIENT: Changes = {
    "gate.h": {"#define WW_GATE_FAIL_OPEN_NS 100000000u": "#define WW_GATE_FAIL_OPEN_NS 100000000000ull"},
}
"""A gate stays closed for 100 s without an arbiter: on a busy machine, a test that stands for it may pause."""
QUICK = ("-O0", "-g0")
"""Compiler options of parts with these limits, which compile in a third of the time. The parts for users are tested
with their own limits."""
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")


def merged(*all_changes: Changes) -> Changes:
    """Return changes together."""
    found: dict[str, dict[str, str]] = {}
    for changes in all_changes:
        for name, pairs in changes.items():
            found.setdefault(name, {}).update(pairs)
    return found


def edit(text: str, pairs: Mapping[str, str], name: str) -> str:
    """Return `text` with each key of `pairs` replaced by its value.

    Keys match token by token, with any white space between the tokens.

    Raises
    ------
    AssertionError
        If a key does not occur exactly once. The message begins with `name`.
    """
    for old, new in pairs.items():
        matches = list(_token_pattern(old).finditer(text))
        assert len(matches) == 1, f"{name} contains {old!r} {len(matches)} times"
        (match,) = matches
        text = text[: match.start()] + new + text[match.end() :]
    return text


def _token_pattern(old: str) -> re.Pattern[str]:
    tokens = re.findall(r"\w+|[^\w\s]", old)
    pattern = re.escape(tokens[0])
    for before, token in pairwise(tokens):
        pattern += (r"\s+" if re.match(r"\w", before) and re.match(r"\w", token) else r"\s*") + re.escape(token)
    indent = r"[ \t]*" if old[0].isspace() else ""
    return re.compile(indent + pattern + (r"[ \t]*\n?" if old[-1] == "\n" else ""))


@contextlib.contextmanager
def changed(changes: Changes, flags: tuple[str, ...] = ()) -> Iterator[lab_build.Built]:
    """Let `build` make and find native parts with changes; servers made inside use them."""
    if not changes and not flags:
        yield lab_build.build()
        return
    with tempfile.TemporaryDirectory(prefix="ww-native-") as folder:
        native, fake = Path(folder) / "native", Path(folder) / "fake"
        shutil.copytree(generate.NATIVE, native)
        shutil.copytree(lab_build.SOURCES, fake)
        for name, pairs in changes.items():
            path = fake / name if name.startswith("fake") else native / name
            path.write_text(edit(path.read_text(), pairs, name))
        cache = folder
        if (changes is TIGHT or changes is PATIENT) and not flags:
            cache, flags = os.environ.get("WARPWELL_CACHE_DIR", "~/.cache"), QUICK
        with (
            mock.patch.object(generate, "NATIVE", native),
            mock.patch.object(lab_build, "SOURCES", fake),
            mock.patch.object(build, "FLAGS", (*build.FLAGS, *flags)),
            mock.patch.dict(os.environ, {"WARPWELL_CACHE_DIR": cache}),
        ):
            yield lab_build.build()
