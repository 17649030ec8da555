"""``warpwell pool top``: what the agents of a running program do, and the CUDA programs that they serve."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ...cache import format_size
from ...errors import ArgumentError, PoolError
from ...pool.launch.job_files import jobs
from ...pool.launch.rendezvous import ask_job
from ..output import Output


def run(arguments: argparse.Namespace) -> int:
    """Ask, once or again and again."""
    if arguments.every is not None and not arguments.every > 0:
        raise ArgumentError(f"--every {arguments.every:g}: give more than 0", name="every")
    output = Output(arguments.json)
    running = {files.job: files for files, alive in jobs() if alive}
    job = arguments.job or (next(iter(running)) if len(running) == 1 else None)
    if job is None or job not in running:
        names = ", ".join(running)
        raise PoolError(
            (f"there is no job {job!r}" if job else "several jobs run here" if running else "no job of yours runs here")
            + (f": choose --job from {names}" if running else ": start one with warpwell run")
        )
    if arguments.every is not None and not 0 < arguments.every < 1e9:
        raise ArgumentError(f"--every {arguments.every:g}: give seconds, more than 0", name="every")
    before: dict[int, tuple[int, float]] = {}
    while True:
        found = ask_job(running[job])
        if arguments.json:
            output.result("", {"command": "top", "job": job, "agents": found})
        else:
            _print(output, job, found)
            before = _print_programs(output, found, before)
        if arguments.every is None:
            return 0
        time.sleep(arguments.every)


def _print(output: Output, job: str, found: list[dict[str, Any]]) -> None:
    heads = (
        "device",
        "host",
        "process",
        "target",
        "calls",
        "launches",
        "sent",
        "received",
        "buffers",
        "held",
        "free",
        "waiting",
        "doing",
    )
    output.table(f"Job {job}", heads, map(_row, found), left=("host", "target", "doing"))


def _row(agent: dict[str, Any]) -> tuple[str, ...]:
    about = str(agent["rank"] - 1), agent["host"], str(agent["pid"])
    info = agent.get("info")
    if info is None:
        return *about, "-", agent["state"]
    links = info["transport"].values()
    lanes = info["lanes"].values()
    return (
        *about,
        info["target"],
        f"{sum(info['calls'].values()):,}",
        f"{info['calls'].get('LAUNCH', 0):,}",
        format_size(sum(p["bytes_sent"] for p in links)),
        format_size(sum(p["bytes_received"] for p in links)),
        str(info["buffers"]),
        format_size(info["held"]),
        format_size(info["free"]),
        str(sum(lane["waiting"] for lane in lanes)),
        ", ".join(sorted({lane["doing"] for lane in lanes if lane["doing"]})) or "-",
    )


def _print_programs(
    output: Output, found: list[dict[str, Any]], before: dict[int, tuple[int, float]]
) -> dict[int, tuple[int, float]]:
    """Print CUDA programs, if there are some; return calls and seconds of each by its worker, for the next look."""
    programs = [(agent, each) for agent in found for each in (agent.get("info") or {}).get("programs", ())]
    rows = []
    for agent, each in sorted(programs, key=lambda pair: pair[1]["device"]):
        calls, seconds = before.get(each["worker"], (0, 0.0))
        rate = (each["calls"] - calls) / max(1e-9, each["seconds"] - seconds)
        who = ("-", "of another host") if each["pid"] is None else (str(each["pid"]), each["command"] or "-")
        rows.append(
            (*who, str(each["device"]), agent["host"], format_size(each["bytes"]), f"{each['calls']:,}", f"{rate:,.0f}")
        )
    if rows:
        heads = ("process", "program", "device", "host", "memory", "calls", "calls/s")
        output.table("CUDA programs", heads, rows, left=("program", "host"))
    return {each["worker"]: (each["calls"], each["seconds"]) for _, each in programs}
