"""Names of objects that agents can create, and imports on first use."""

import os
import signal
import threading
import warnings
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

import warpwell
from warpwell import errors, registry


def test_names() -> None:
    for name in ("open", "create", "cache", "array part", "store", "scheduler"):
        assert callable(registry.load(registry.path_of(name)))
    assert registry.path_of("some.module:thing") == "some.module:thing"
    with pytest.raises(errors.ArgumentError, match=r"unknown service 'none': choose one of .*open"):
        registry.path_of("none")
    with pytest.raises(errors.ArgumentError, match="'module:callable'"):
        registry.path_of("a:b:c")


def test_every_path_of_a_class_leads_to_one() -> None:
    for path in registry.stand_ins.values():
        assert isinstance(registry.load(path), type)


def test_a_module_of_a_program_may_use_warpwell_in_other_threads_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import threading, warpwell",
        "thread = threading.Thread(target=lambda: warpwell.rows, daemon=True)",
        "thread.start()",
        "thread.join(10)",
        "def ended(): return not thread.is_alive()",
    )
    (tmp_path / "of_a_program.py").write_text("\n".join(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(vars(warpwell), "rows", raising=False)  # as if it had not been used yet
    assert registry.load("of_a_program:ended")()


def test_a_forked_child_imports_although_a_thread_was_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(warpwell), "rows", raising=False)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with registry.importing:
            held.set()
            over.wait(HANG_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(HANG_SECONDS)
    with warnings.catch_warnings():
        # Python warns about fork() with threads, which this test needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        warpwell.rows  # noqa: B018 - imported on first use
        os._exit(0)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        over.set()
        thread.join()
