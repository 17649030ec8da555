"""The table of commands of ``python -m lab``.

A command is a function ``main(argv: list[str]) -> int | None`` that parses its own arguments and returns an exit
status (None counts as 0). Its module is imported only if the command runs.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of ``python -m lab``.

    Parameters
    ----------
    target : str
        ``module:function``.
    help : str
        Effect of the command, in lower case, without a period.
    """

    target: str
    help: str

    def run(self, argv: list[str]) -> int:
        """Import the module and call the function with the arguments after the name of the command."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)(argv) or 0


COMMANDS: dict[str, Command] = {
    "bench": Command("lab.bench.cli:main", "run, compare and record benchmarks"),
    "bench drive": Command(
        "lab.bench.commands.drive:main", "measure how fast kernels read from a drive, without writing to it"
    ),
    "bench kv": Command(
        "lab.bench.commands.kv:main", "measure operations per second and latencies of a store with YCSB"
    ),
    "campaign drive_losses": Command("lab.campaigns.drive_losses:main", "kill QEMU while kernels write to its drive"),
    "campaign interleavings": Command(
        "lab.campaigns.interleavings:main", "run models on weak memory, in seeded orders"
    ),
    "campaign interrupts": Command("lab.campaigns.interrupts:main", "interrupt programs with Ctrl-C at random moments"),
    "campaign kv_crash": Command("lab.campaigns.kv_crash:main", "kill writers of a store, cut power, flip bits"),
    "campaign kv_imports": Command(
        "lab.campaigns.kv_imports:main", "import image data sets into stores through kills, and compare"
    ),
    "campaign kv_model": Command("lab.campaigns.kv_model:main", "compare random operations on a store with a dict"),
    "campaign kv_training": Command("lab.campaigns.kv_training:main", "train from a store through kills, and compare"),
    "campaign sched_order": Command(
        "lab.campaigns.sched_order:main", "run random tasks on overlapping arrays, and compare with serial runs"
    ),
    "campaign table_corpus": Command(
        "lab.campaigns.table_corpus:main", "convert the files of a folder, and compare with pyarrow"
    ),
    "campaign pool_faults": Command(
        "lab.campaigns.pool_faults:main", "kill, interrupt and starve jobs of warpwell run at random moments"
    ),
    "paper": Command("lab.paper.command:main", "rerun the experiments of the source documents and compare shapes"),
    "run": Command("lab.link:main", "run warpwell run with emulated links between the agents"),
    "sched check": Command(
        "lab.sched.baseline:main", "compare the default policy in the simulator with stored results"
    ),
    "sched fit": Command("lab.sched.fit:main", "fit the cost formula and the predictor to measurements"),
    "sched run": Command("lab.sched.run:main", "run kernels under policies, on the CPU or a GPU, and compare"),
    "sched simulate": Command("lab.sched.simulate:main", "replay a trace under policies, in virtual time"),
    "sched trace": Command("lab.sched.trace:main", "show the contents of a trace, and write it as a table"),
}
"""Commands by name: one word, or a group and a verb (``"sched simulate"``)."""


def usage() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS), default=0)
    entries = [f"  {name:<{width}}  {COMMANDS[name].help}" for name in sorted(COMMANDS)]
    return "\n".join(["usage: python -m lab COMMAND [ARGUMENT ...]", "", "commands:", *entries])


def main(argv: list[str] | None = None) -> int:
    """Run the command whose name starts `argv`; without one, list all commands.

    A command may be a group and a verb; then the first two arguments are its name.
    """
    argv = sys.argv[1:] if argv is None else argv
    for count in (2, 1):
        name = " ".join(argv[:count])
        if len(argv) >= count and name in COMMANDS:
            sys.argv[0] = f"python -m lab {name}"  # for usage lines of the command
            return COMMANDS[name].run(argv[count:])
    if argv and argv[0] not in ("-h", "--help"):
        verbs = sorted(name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{argv[0]} "))
        expectation = f"expected one of {', '.join(verbs)}" if verbs else "`python -m lab` lists all commands"
        print(f"unknown command {' '.join(argv[: 2 if verbs else 1])!r}; {expectation}", file=sys.stderr)
        return 2
    print(usage())
    return 0
