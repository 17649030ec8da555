"""Commands with data pointers of several pages, and cids of several generations, in PTX; no GPU is needed."""

from __future__ import annotations

import re

import numpy as np
import pytest

import warpwell as ww
from warpwell.queues.completion import deliver, poll
from warpwell.queues.submission import prp2_of, release_id, staging_of, submit, take_id
from warpwell.targets.compiler import run_cuda

pytestmark = pytest.mark.ptx

WORD = np.int64(0)
OUT = np.zeros(2, np.int64)


@ww.kernel
def send(queue, cid, nbytes, slba, out):
    out[0] = submit(queue, cid << 16, staging_of(queue, cid), prp2_of(queue, cid, nbytes), slba, 7)


@ww.kernel
def use(queue, status, out):
    cid = take_id(queue, 0)
    out[0] = deliver(queue, cid, status)
    out[1] = poll(queue, cid)
    release_id(queue, cid)


def statements(kernel: object, count: int) -> list[str]:
    text = run_cuda.ptx(kernel, (WORD,) * count + (OUT,))
    body = text[text.index("{", text.index(".visible .entry")) :]
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("//")]


def test_a_command_is_whole_before_its_mark_and_prp2_is_stored_where_there_is_one() -> None:
    code = statements(send, 4)
    mark = next(k for k, line in enumerate(code) if line.startswith("atom.acq_rel.gpu.global.exch"))
    offsets = {}
    for k, line in enumerate(code):
        if m := re.match(r"add\.s64\s+(%rd\d+), (%rd\d+), (\d+);", line):
            offsets[m[1]] = m[2], int(m[3])
        if (m := re.match(r"st\.relaxed\.sys\.global\.u64 \[(%rd\d+)\], (%rd\d+);", line)) and k < mark:
            offsets[m[2], k] = m[1]
    stores = [
        (k, m[1], m[2])
        for k, line in enumerate(code[:mark])
        if (m := re.match(r"st\.relaxed\.sys\.global\.u64 \[(%rd\d+)\], (%rd\d+);", line))
    ][-5:]
    entry = stores[0][1]
    assert [offsets[at] for _, at, _ in stores[1:]] == [(entry, 24), (entry, 32), (entry, 40), (entry, 48)]
    # A branch skips the store of prp2 if it is 0.
    where, _, prp2 = stores[2]
    label = next(line for line in code[where:] if line.endswith(":"))[:-1]
    jump = max(k for k in range(where) if re.match(rf"@%p\d+ bra\s+\{label};", code[k]))
    predicate = re.match(r"@(%p\d+)", code[jump])[1]
    assert any(re.match(rf"setp\.eq\.s64\s+{predicate}, {prp2}, 0;", line) for line in code[:jump])
    assert stores[1][0] < jump and where < next(k for k, line in enumerate(code) if line == f"{label}:") < stores[3][0]


def test_one_page_two_pages_and_a_list_are_three_ways() -> None:
    code = statements(send, 4)
    bounds = {int(m[1]) for line in code if (m := re.match(r"setp\.\w+\.s64\s+%p\d+, %rd\d+, (\d{4});", line))}
    assert bounds in ({4096, 8192}, {4097, 8193}, {4096, 8193}, {4097, 8192})


def test_the_generation_is_compared_by_the_exchange_that_decides() -> None:
    code = statements(use, 2)
    exchanges = [k for k, line in enumerate(code) if line.startswith("atom.acq_rel.gpu.global.cas.b64")]
    assert len(exchanges) == 3  # state changes: to taken, then to done or to orphaned
    exchange = code[exchanges[1]]
    expected = re.match(r"atom\S+ %rd\d+, \[%rd\d+\], (%rd\d+),", exchange)[1]
    # the expected state is computed from the cid, and not read from the record
    (made,) = [line for line in code if re.match(rf"(?:or|add)\.\w+\s+{expected}, (%rd\d+), 1;", line)]
    source = re.search(r", (%rd\d+), 1;", made)[1]
    assert any(re.match(rf"shl\.b64\s+{source}, %rd\d+, 8;", line) for line in code)
    # the id is given back for the next generation, of 16 bits with the id, by one release
    released = next(line for line in code if line.startswith("st.release.gpu"))
    after = re.search(r", (%rd\d+);", released)[1]
    assert any(re.match(rf"and\.b64\s+{after}, %rd\d+, {0xFFFF << 8};", line) for line in code)
