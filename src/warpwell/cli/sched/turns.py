"""``warpwell sched end`` and ``sched limit``: programs that take turns; `show`: what ``sched status`` says of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...json_file import read_json
from ...turns.choice import CEILING, HOLD
from ...turns.operate import GRACE, end, limit
from ..arguments import Commands, command, json_option
from ..output import Output

_SHORT = 12
"""Characters of a device's name in a table."""


def add(verbs: Commands[argparse.ArgumentParser]) -> None:
    """Add ``end`` and ``limit`` to the commands of ``sched``."""
    ends = command(verbs, "end", "sched.turns", "end the programs of a tenant that takes turns at a GPU")
    ends.add_argument("who", metavar="TENANT", help="its name, or the number of a process, as sched status shows them")
    ends.add_argument(
        "--grace",
        type=float,
        default=GRACE,
        metavar="SECONDS",
        help=f"from the first signal to the second (default {GRACE:g})",
    )
    json_option(ends)
    limits = command(verbs, "limit", "sched.turns", "set what turns may do, at all devices of this user")
    limits.add_argument(
        "--hold",
        type=float,
        default=HOLD,
        metavar="SECONDS",
        help=f"who lets others wait for longer loses the lease (default {HOLD:g})",
    )
    limits.add_argument(
        "--ceiling", type=int, default=CEILING, metavar="N", help=f"priorities count up to it (default {CEILING})"
    )
    limits.add_argument("--tenants", metavar="FILE.json", help="{name: {hold, ceiling, priority}}: those that differ")
    json_option(limits)


def run(arguments: argparse.Namespace) -> int:
    """End a tenant, or set limits."""
    output = Output(arguments.json)
    if arguments.command == "end":
        output.result("Ended", {"command": "end", "processes": end(arguments.who, arguments.grace)})
        return 0
    own = None if arguments.tenants is None else read_json(arguments.tenants, "the file of --tenants, tenants by name")
    devices = limit(hold=arguments.hold, ceiling=arguments.ceiling, tenants=own)
    output.result(
        "Limits of turns",
        {
            "command": "limit",
            "hold": arguments.hold,
            "ceiling": arguments.ceiling,
            "tenants": sorted(own or {}),
            "devices": devices,
        },
    )
    return 0


def show(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    """Print who takes turns."""
    heads = ("device", "process", "tenant", "priority", "state", "for, s", "turns", "used, s")
    cells = [
        (
            row["device"][:_SHORT],
            str(row["process"]),
            row["tenant"],
            str(row["priority"]),
            row["state"],
            f"{row['seconds']:.3f}",
            f"{row['turns']:,}",
            f"{row['used']:.3f}",
        )
        for row in rows
    ]
    output.table("Turns", heads, cells, ("tenant", "state"))
