"""Python imports this at its start. It does to one agent of a pool what WARPWELL_TEST_PLANTED says: RANK:WHAT,...

``launcher:NAME`` lets the launcher write ``held`` and wait when it calls this function of ``warpwell.pool.launch``;
``interrupt:NAME`` presses Ctrl-C at the beginning of that call.
"""

import importlib.abc
import os
import signal
import sys
import time


class _At(importlib.abc.MetaPathFinder):
    """Acts when a module is imported."""

    def __init__(self, name, act):
        self.name, self.act = name, act

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            self.act()
        return None


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _protocol():
    sys.meta_path.pop(0)
    from warpwell.pool.launch import versions

    versions.PROTOCOL = 99


ACTS = {
    "kill-at-start": (None, _kill),
    "exit-at-start": (None, lambda: os._exit(7)),
    "kill-before-mpi": ("mpi4py.MPI", _kill),
    "stop-before-mpi": ("mpi4py.MPI", _stop),
    "kill-in-mpi": ("warpwell.pool.transport.mpi_transport", lambda: (sys.meta_path.pop(0), _later(_kill))),
    "no-agent": ("warpwell.pool.agent.agent", lambda: sys.exit("no module for you")),
    "another-protocol": ("warpwell.pool.agent.agent", _protocol),
}


def _later(act):
    import threading

    threading.Timer(0.05, act).start()
    time.sleep(0)


def _hold(*_arguments, **_options):
    print("held", flush=True)
    time.sleep(600)


def _replace(path, replacement):
    """Replace a function of the launcher by what `replacement` makes of it."""
    from importlib import import_module

    module, *names, name = path.split(".")
    holder = import_module(f"warpwell.pool.launch.{module}")
    for each in names:
        holder = getattr(holder, each)
    setattr(holder, name, replacement(getattr(holder, name)))


def _interrupted(function):
    def call(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments, **options)

    return call


if any(name.endswith("agent_main") for name in sys.orig_argv):
    for plant in os.environ.get("WARPWELL_TEST_PLANTED", "").split(","):
        rank, _, action = plant.partition(":")
        if rank and rank == os.environ.get("PMIX_RANK"):
            module, act = ACTS[action]
            if module is None:
                act()
            else:
                sys.meta_path.insert(0, _At(module, act))
if sys.orig_argv[1:4] == ["-m", "warpwell", "run"]:
    rank, _, action = os.environ.get("WARPWELL_TEST_PLANTED", "").partition(":")
    if rank == "launcher":
        _replace(action, lambda _function: _hold)
    elif rank == "interrupt":
        _replace(action, _interrupted)
