"""Commands of kernels without a cache: the benchmarks `block` and `iodepth`.

As BaM's raw figure: each thread submits the command of a page, waits for it, and the page's bytes are in device memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell.array import Array
from warpwell.cache import queue_of
from warpwell.cache.transfer import copy, serve, start, wait
from warpwell.nvme import READ, WRITE
from warpwell.queues import release_id, staging_of, take_id
from warpwell.targets import kernel, memory_for, to_device
from warpwell.targets.primitives import (
    DEVICE,
    activemask,
    backoff,
    ballot,
    div,
    fetch_add,
    grid,
    lane_id,
    load_relaxed,
    shfl,
    syncwarp,
    warp_size,
)

from .ceilings import medium_rate
from .figures import Report, Row, require_same, seconds
from .setting import Setting, model_of, numbers

Items = NDArray[np.int64]


@kernel
def _commands(a, order, opcode, size, source, buffers, found):
    """Read the pages that `order` names, or write those of `source`; a command a thread, no cache (whole warps).

    A page that was read goes to its warp's buffer, and its first word is added to found[0]; found[1] counts failures,
    found[2] is the number of threads.
    """
    core = a.core
    space = a.space
    mask = activemask()
    lane = lane_id()
    k = grid(1)
    buffer = buffers + div(k, warp_size()) * size
    attempt = 0
    while ballot(mask, k < order.size) != 0:
        page = 0
        cid = -1
        if k < order.size:
            page = order[k]
        queue = queue_of(core, page)
        for turn in range(warp_size()):
            page_of_turn = shfl(mask, page, turn)
            got = -1
            if lane == turn and k < order.size:
                got = take_id(queue, 0)
            got = shfl(mask, got, turn)
            if got >= 0:
                if opcode == WRITE:
                    syncwarp(mask)
                    copy(staging_of(shfl(mask, queue, turn), got), source + page_of_turn * size, size, mask, lane)
                    syncwarp(mask)
                if lane == turn:
                    cid = got
                    if not start(core, queue, cid, opcode, page, 1, space):
                        fetch_add(found + 8, 1, DEVICE)
        ended = 0
        for turn in range(warp_size()):
            cid_of_turn = shfl(mask, cid, turn)
            if cid_of_turn >= 0:
                queue_of_turn = shfl(mask, queue, turn)
                status = wait(core, space, queue_of_turn, cid_of_turn, mask, lane, turn)
                if status == 0 and opcode == READ:
                    syncwarp(mask)
                    copy(buffer, staging_of(queue_of_turn, cid_of_turn), size, mask, lane)
                    syncwarp(mask)
                    if lane == turn:
                        fetch_add(found, load_relaxed(buffer, DEVICE), DEVICE)
                    syncwarp(mask)
                ended += 1
                if lane == turn:
                    if status >= 0:
                        release_id(queue, cid_of_turn)
                    if status != 0:
                        fetch_add(found + 8, 1, DEVICE)
                    k += load_relaxed(found + 16, DEVICE)
        if ended == 0:
            # This warp has no command id, so it may wait until other warps release ids.
            serve(core, shfl(mask, queue, 0), mask, lane, 0)
            backoff(attempt)
            attempt += 1


class _Raw:
    """Commands of a kernel on a medium, for pages in one order."""

    def __init__(self, setting: Setting, array: Array, data: Items, order: Items, opcode: int) -> None:
        # More threads than command ids would only compete for the ids.
        ids = array.cache.pairs.count * array.cache.pairs.ids
        setting = replace(setting, threads=max(64, min(setting.threads, -(-ids // 32) * 32)))
        self.setting, self.array, self.data, self.order, self.opcode = setting, array, data, order, opcode
        memory = memory_for(setting.device)
        width = 32 if setting.device == "cuda" else 1
        self._source = memory.allocate(data.nbytes + 512)
        self._buffers = memory.allocate(setting.threads // width * setting.page_size + 512)
        self._found = memory.allocate(24)

    def rate(self, name: str) -> float:
        """Return the commands a second, in millions."""
        setting = self.setting
        order = to_device(setting.device, self.order)
        source, buffers = (-(-block.address // 512) * 512 for block in (self._source, self._buffers))
        self._source.write(source - self._source.address, self.data)

        def launch() -> None:
            self._found.write(0, np.array([0, 0, setting.threads]))
            _commands[setting.threads](
                self.array,
                order,
                self.opcode,
                setting.page_size,
                source,
                buffers,
                self._found.address,
                device=setting.device,
            )

        times = seconds(launch, setting.runs)
        total, failed, _ = self._found.read(0, 24).view(np.int64)
        require_same(f"{name}: commands that failed", int(failed), 0)
        if self.opcode == READ:
            firsts = self.data[self.order * (setting.page_size // 8)]
            require_same(f"{name}: the first words of pages", int(total), int(firsts.sum()))
        return len(self.order) / times / 1e6


def rate_of(setting: Setting, name: str, data: Items, order: Items, opcode: int, **options: Any) -> Row:
    """Return a row of commands, compared with the rates of the medium and the drives."""
    writes = opcode == WRITE
    start_with = np.zeros_like(data) if writes else data
    cache_options = {"cache": 64 * setting.page_size, "merge": 1, "mode": "r+" if writes else "r"} | options
    with setting.opened(start_with, **cache_options) as array:
        rate = _Raw(setting, array, data, order, opcode).rate(name)
        if writes:
            pages = np.sort(order)[:64]
            size, run = setting.page_size, setting.page_size // 8
            found = np.stack([array.medium.read(int(p) * size, size).view(np.int64) for p in pages])
            require_same(f"{name}: written pages", found, np.stack([data[p * run : (p + 1) * run] for p in pages]))
    alone = medium_rate(setting, start_with, order, write=writes) / 1e6
    bound, by = alone, "the medium alone"
    if setting.emulated:
        model, slower = model_of(setting.medium)
        drives = setting.drives * (model.write_iops if writes else model.read_iops)[setting.page_size >= 4096]
        bound, by = min((alone, by), (drives / slower / 1e6, "the drives' rate"))
    return Row(name, rate, bound, by, notes={"GB_a_second": rate * setting.page_size / 1e3, "drives": setting.drives})


def _orders(setting: Setting, max_pages: int) -> tuple[Items, Items]:
    pages = setting.nbytes // setting.page_size
    order = np.arange(pages)
    return order[:max_pages], np.random.default_rng(4).permutation(order)[:max_pages]


def _max_pages(setting: Setting) -> int:
    """Return the number of commands of a figure: as many as slow drives complete in a quarter of a second."""
    max_pages = 1 << (21 if setting.device == "cuda" else 15)
    if setting.emulated:
        model, slower = model_of(setting.medium)
        max_pages = min(max_pages, max(1 << 10, int(setting.drives * model.write_iops[0] / slower / 4)))
    return max_pages


def block(setting: Setting) -> Report:
    """Read and write pages in order and at random; with several drives also on half as many, and so on."""
    data = numbers(setting.items)
    depth = {"depth": 1024 if setting.device == "cuda" else 128}
    rows = []
    counts = {setting.drives}
    while setting.emulated and min(counts) > 1:
        counts.add(min(counts) // 2)
    for drives in sorted(counts):
        chosen = setting.over(setting.medium, drives)
        in_order, random = _orders(chosen, _max_pages(chosen))
        named = f", {drives} drive{'s' * (drives > 1)}" if len(counts) > 1 else ""
        rows.append(rate_of(chosen, f"random reads{named}", data, random, READ, **depth))
        rows.append(rate_of(chosen, f"random writes{named}", data, random, WRITE, **depth))
    rows.append(rate_of(setting, "sequential reads", data, in_order, READ, **depth))
    rows.append(rate_of(setting, "sequential writes", data, in_order, WRITE, **depth))
    return Report("block", f"M commands/s of {setting.page_size} B", setting.where(), rows, setting.emulated)


def iodepth(setting: Setting) -> Report:
    """Read pages at random with one queue, of more and more entries."""
    data = numbers(setting.items)
    _, random = _orders(setting, _max_pages(setting) // 2)
    rows = []
    for shift in range(3, 11 if setting.device == "cuda" else 8):
        row = rate_of(setting, f"{1 << shift} in flight", data, random, READ, depth=2 << shift, queues=1)
        rows.append(row)
    return Report("iodepth", f"M commands/s of {setting.page_size} B", setting.where(), rows, setting.emulated)
