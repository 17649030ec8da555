"""`Host`, and the number of agents of each host, from ``--hosts``, a host file, or the environment of Slurm."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import ArgumentError, MissingFileError

_MAX_HOSTS = 1 << 20
"""Maximum number of hosts in a list, so that a typing error in a range does not exhaust memory."""


@dataclass(frozen=True)
class Host:
    """A host, and its maximum number of agents, or None if the number is not given."""

    name: str
    agents: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """Read ``a:8,b:8`` or ``a,b``, also with Slurm's ranges (``n[01-03,7]:2``).

    Raises
    ------
    ArgumentError
    """
    found: list[Host] = []
    for entry in _split(text):
        name, colon, count = entry.partition(":")
        if colon and (not count.isdecimal() or int(count) < 1):
            raise ArgumentError(f"--hosts {entry}: expected NAME or NAME:AGENTS with at least 1 agent", name="hosts")
        found += [Host(each, int(count) if colon else None) for each in expand(name)]
    return _merge(found, "--hosts is empty")


def read_hostfile(path: str) -> list[Host]:
    """Read a host file of Open MPI (``name slots=8``) or MPICH (``name:8``); ``#`` starts a comment.

    Raises
    ------
    MissingFileError
    ArgumentError
        A line has another form; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist; expected a file with a host in each line", path=path) from error
    found: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        name, *fields = line.partition("#")[0].split() or [""]
        if not name:
            continue
        name, colon, count = name.partition(":")
        for word in fields:
            key, equals, value = word.partition("=")
            if not equals:
                raise ArgumentError(
                    f"{path}, line {number}: expected a field such as slots=8, got {word!r}", name="hostfile"
                )
            if key == "slots":
                colon, count = ":", value
        if colon and (not count.isdecimal() or int(count) < 1):
            raise ArgumentError(
                f"{path}, line {number}: the number of agents must be at least 1, got {count!r}", name="hostfile"
            )
        found.append(Host(name, int(count) if colon else None))
    return _merge(found, f"{path} has no host")


def slurm_hosts(environ: Mapping[str, str], gpus: Mapping[str, int]) -> list[Host] | None:
    """Return the hosts of a Slurm job with an agent for each task; None outside of a job.

    If the job does not have a number of tasks (``SLURM_NTASKS``), each host has an agent for each of its `gpus`, or as
    many as ``SLURM_TASKS_PER_NODE`` or ``SLURM_GPUS_ON_NODE``.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return None
    names = expand_list(nodes)
    tasks: list[int | None] = list(_tasks(environ.get("SLURM_TASKS_PER_NODE", "")))
    if gpus and not environ.get("SLURM_NTASKS"):
        return [Host(name, gpus[name]) for name in names if name in gpus]
    if len(tasks) != len(names):
        count = environ.get("SLURM_GPUS_ON_NODE", "")
        tasks = [int(count) if count.isdecimal() and int(count) else None] * len(names)
    return _merge([Host(n, t) for n, t in zip(names, tasks, strict=True)], f"SLURM_JOB_NODELIST={nodes} has no host")


def expand_list(names: str) -> list[str]:
    """Return the hosts of several entries in Slurm's notation, as in ``a,n[1-2]``."""
    return [name for entry in _split(names) for name in expand(entry)]


def expand(names: str) -> list[str]:
    """Return the hosts of one entry of Slurm's notation: ``n[01-03,7]`` is n01, n02, n03 and n7.

    Raises
    ------
    ArgumentError
    """
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", names)
    if match is None:
        if not names or re.search(r"[\[\]\s]", names) or names.startswith("-"):
            raise ArgumentError(f"{names!r} is not a host; expected a, n[01-16] or 10.0.0.1", name="hosts")
        return [names]
    before, inner, after = match.groups()
    middles: list[str] = []
    for part in inner.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ArgumentError(f"{names!r}: expected a number or a range such as 01-16, got {part!r}", name="hosts")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low >= _MAX_HOSTS:
            raise ArgumentError(f"{names!r}: the range {part!r} has no end or is too long", name="hosts")
        middles += [f"{k:0{len(first)}d}" for k in range(low, high + 1)]
    tails = expand(after) if after else [""]
    if len(middles) * len(tails) > _MAX_HOSTS:
        raise ArgumentError(f"{names!r} names more than {_MAX_HOSTS} hosts", name="hosts")
    return [f"{before}{middle}{tail}" for middle in middles for tail in tails]


def assign_agents(hosts: Iterable[Host], agents: int | None) -> list[Host]:
    """Distribute agents: fill the hosts in their order, or spread evenly if no host has a number.

    Parameters
    ----------
    hosts : iterable of Host
    agents : int, optional
        Default: the maximum of each host; one for a host without a number.

    Returns
    -------
    list of Host
        The hosts with agents, and the number of agents of each.

    Raises
    ------
    ArgumentError
        The hosts may have fewer agents.
    """
    listed = list(hosts)
    if agents is None:
        return [Host(h.name, h.agents or 1) for h in listed]
    if agents < 1:
        raise ArgumentError(f"--agents must be at least 1, got {agents}", name="agents")
    if all(h.agents is None for h in listed):
        each, more = divmod(agents, len(listed))
        shares = [each + (k < more) for k in range(len(listed))]
    else:
        room = sum(h.agents or 1 for h in listed)
        if agents > room:
            raise ArgumentError(
                f"--agents must be at most {room} for these hosts, got {agents}; add hosts, or agents as in a:8",
                name="agents",
            )
        shares, left = [], agents
        for h in listed:
            shares.append(min(left, h.agents or 1))
            left -= shares[-1]
    return [Host(h.name, share) for h, share in zip(listed, shares, strict=True) if share]


def is_here(name: str) -> bool:
    """Return True if a name means this host."""
    own, short = socket.gethostname(), socket.gethostname().partition(".")[0]
    is_address = name.replace(".", "").isdecimal()
    return name in ("localhost", "127.0.0.1", "::1", own, short) or (name.partition(".")[0] == short and not is_address)


def _split(text: str) -> list[str]:
    """Split at commas that are not in brackets."""
    return [entry for entry in re.split(r",(?![^\[]*\])", text.strip()) if entry]


def _tasks(text: str) -> list[int]:
    """Read ``2(x3),1`` as [2, 2, 2, 1]; return nothing for any other text."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None or int(match[2] or 1) > _MAX_HOSTS:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _merge(hosts: list[Host], problem: str) -> list[Host]:
    """Add the agents of hosts that are listed twice; raise if the list is empty."""
    if not hosts:
        raise ArgumentError(f"{problem}; name at least one host", name="hosts")
    merged: dict[str, int | None] = {}
    for host in hosts:
        before = merged.get(host.name)
        merged[host.name] = host.agents if before is None else before + (host.agents or 1)
    return [Host(name, count) for name, count in merged.items()]
