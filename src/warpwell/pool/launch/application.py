"""``python -m warpwell.pool.launch.application FILE ...``: runs a program as ``python FILE ...`` would, with a pool.

A compiled program is a child of this process.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ..._os import end_with_parent
from ...errors import WarpwellError
from .. import devices
from . import cuda_programs, job_output
from .member import Member, forget_launcher

_INTERRUPTED = 130
_FLUSH_FAILED = 120  # as Python does
_NOT_EXECUTED = 126  # as a shell does
_REPEAT_SECONDS = 0.01
"""Time until an interrupt is repeated: the interrupted finalizer has ended before that."""

_status = _INTERRUPTED  # set when the program has ended; before that, only an interrupt ends the process
_ended = False


def main(command: Sequence[str]) -> None:
    """Join the job, run the program, and end the process."""
    member = Member()
    atexit.register(_finish)  # registered first, so that it is called last
    try:
        chosen = member.wait_for_go()
        trace = os.environ.get("WARPWELL_POOL_TRACE")
        agents = range(1, 1 + int(chosen["agents"]))
        pool = devices.Devices(member.connect(), agents=agents, idle=chosen["idle"])
        devices.use(pool)
    except Exception as error:
        member.send(failed=str(error) or type(error).__name__)
        os._exit(1)
    _restore_signals()
    if folder := os.environ.pop(job_output.FOLDER, None):
        job_output.AgentOutput(folder).show()
    forget_launcher()
    atexit.register(_close_pool, pool, trace)
    sys.unraisablehook = _raise_again
    member.wait_for_start()
    sys.exit(_run(command, member))


def _restore_signals() -> None:
    """Restore the default handlers of signals for which MPI has set its own."""
    traced = faulthandler.is_enabled()
    for number in (signal.SIGHUP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV):
        signal.signal(number, signal.SIG_DFL)
    if traced:
        faulthandler.disable()
        faulthandler.enable()


def _run(command: Sequence[str], member: Member) -> int:
    """Run the program; return its exit status."""
    global _status, _ended
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.path[0] = os.getcwd()
            runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        elif command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            sys.path[0] = ""
            exec(compile(command[1], "<string>", "exec", dont_inherit=True), vars(_main_module(None)))
        elif cuda_programs.is_compiled_program(command):
            sys.exit(_run_compiled(command, member))
        else:
            _run_file(command)
        _status = 0
    except SystemExit as end:
        _status = _status_of(end.code)
    except BaseException as error:
        _status = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    _ended = True
    return _status


def _run_compiled(command: Sequence[str], member: Member) -> int:
    """Run a program in its own process group, which receives the signals; return the status as a shell would."""
    path = os.path.abspath(command[0])
    try:
        environ = cuda_programs.program_environ(path)
        child = subprocess.Popen(command, executable=path, env=environ, process_group=0, preexec_fn=end_with_parent)
    except OSError as error:
        print(f"warpwell: error: {command[0]} cannot be executed: {error.strerror}", file=sys.stderr)
        return _NOT_EXECUTED

    def pass_on(number: int, _frame: object) -> None:
        if child.poll() is None:
            os.killpg(child.pid, number)

    member.send(group=child.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _run_file(command: Sequence[str]) -> None:
    path = os.path.abspath(command[0])
    sys.argv = list(command)
    if not os.path.isfile(path) or _is_archive(path):
        sys.path[0] = path
        _main_module(path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as stream:
        source = stream.read()
    module = _main_module(path)
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))


def _main_module(path: str | None) -> types.ModuleType:
    """Make an empty ``__main__``, as the interpreter does for a program."""
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=__builtins__, __annotations__={})
    if path is not None:
        vars(module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    sys.modules["__main__"] = module
    return module


def _is_archive(path: str) -> bool:
    with open(path, "rb") as stream:
        return stream.read(4) == b"PK\3\4"


def _status_of(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(OSError, ValueError):
        print(code, file=sys.stderr)
    return 1


def _raise_again(unraisable: Any) -> None:
    """Repeat an interrupt that arrived in a finalizer, where Python drops it; report all other exceptions as usual.

    Python would also drop an interrupt that arrives during the report, often silently.
    """
    is_interrupted = issubclass(unraisable.exc_type, KeyboardInterrupt)
    try:
        if not is_interrupted:
            is_interrupted = _report(unraisable)
    except KeyboardInterrupt:
        is_interrupted = True
    if is_interrupted:
        with contextlib.suppress(RuntimeError):  # no thread can be started while the process exits
            # later and in another thread, because Python would drop it here again; `threading` would acquire locks
            _thread.start_new_thread(_interrupt_soon, ())


def _report(unraisable: Any) -> bool:
    """Report an exception; return True if an interrupt arrived during the report."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.get_ident() != threading.main_thread().ident:
        sys.__unraisablehook__(unraisable)
        return False
    interrupts: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        sys.__unraisablehook__(unraisable)
    finally:
        signal.signal(signal.SIGINT, handler)
    return bool(interrupts)


def _interrupt_soon() -> None:
    time.sleep(_REPEAT_SECONDS)
    main_thread = threading.main_thread().ident
    if not _ended and main_thread is not None:
        signal.pthread_kill(main_thread, signal.SIGINT)  # interrupts any thread that is in a system call


def _close_pool(pool: devices.Devices, trace: str | None) -> None:
    if trace is not None:
        _write_trace(trace, pool)
    with contextlib.suppress(WarpwellError):
        pool.close()


def _write_trace(trace: str, pool: devices.Devices) -> None:
    """Write the calls on each device as JSON. If this fails, the program fails, because its options request it."""
    global _status
    reports = []
    try:
        for d in pool:
            calls = {name: {"count": n, "bytes": b, "wait_seconds": w} for name, (n, b, w) in d.trace().items()}
            properties = {name: getattr(d, name) for name in ("name", "host", "target", "lost")}
            reports.append({"device": d.index, **properties, "calls": calls})
        Path(trace).write_text(json.dumps({"devices": reports}, indent=1) + "\n", encoding="utf-8")
    except (OSError, WarpwellError) as error:
        _status = _status or 1
        with contextlib.suppress(OSError, ValueError):
            print(f"warpwell: error: the trace {trace} was not written: {error}", file=sys.stderr)


def _finish() -> None:
    """End the process, as its last exit handler, because MPI's own exit handler might wait forever."""
    status = _status
    try:
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except (OSError, ValueError):
                status = status or _FLUSH_FAILED
    finally:  # even after an interrupt
        os._exit(status)


if __name__ == "__main__":
    # the names of the program's own `__main__` must not overwrite the names of this module
    from warpwell.pool.launch import application

    application.main(sys.argv[1:])
