"""Names of what agents can make: those that come with Warpwell are there from the start, and may be taken."""

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

import warpwell
from warpwell import errors, registry


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_paths", {kind: dict(paths) for kind, paths in registry._paths.items()})
    yield


def test_names() -> None:
    for name in ("open", "create", "cache", "array part", "store", "scheduler"):
        assert callable(registry.load(registry.path_of("service", name)))
    assert registry.path_of("service", "some.module:thing") == "some.module:thing"
    with pytest.raises(errors.ArgumentError, match=r"unknown service 'none': choose one of .*open"):
        registry.path_of("service", "none")


@pytest.mark.parametrize("kind", ["stand-in", "scheduler"])
def test_every_path_that_comes_with_warpwell_leads_to_something(kind: str) -> None:
    for path in registry._paths[kind].values():
        assert isinstance(registry.load(path), type)


def test_a_name_that_somebody_has_taken_stays_theirs() -> None:
    registry.register("service", "cache", "mine:Cache")
    registry.load(registry.path_of("stand-in", "open"))  # importing what comes with Warpwell registers nothing again
    assert registry.path_of("service", "cache") == "mine:Cache"
    registry.register("service", "cache", "mine:Other")
    assert registry.path_of("service", "cache") == "mine:Other"


def test_a_path_names_a_module_and_an_attribute() -> None:
    with pytest.raises(errors.ArgumentError, match="give 'module:callable'"):
        registry.register("service", "cache", "mine.Cache")


def test_a_module_of_a_program_may_use_warpwell_in_other_threads_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "import threading, warpwell",
        "thread = threading.Thread(target=lambda: warpwell.rows, daemon=True)",
        "thread.start()",
        "thread.join(10)",
        "def ended(): return not thread.is_alive()",
    )
    (tmp_path / "of_a_program.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(vars(warpwell), "rows", raising=False)  # as if nobody had used it yet
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
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: it is what is tested
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
