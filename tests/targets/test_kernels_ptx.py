"""Every kernel compiles to PTX without a GPU, and the hit loop has its loads in the right order."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
from tests.harness.arrays.kernels import add, read, write

import warpwell as ww
from warpwell import errors, gpu
from warpwell.array import host_access
from warpwell.array.items import item_of
from warpwell.array.page_set import PageSetView
from warpwell.array.view import ArrayView, ViewField, ViewStatic
from warpwell.cache import known_pages, maintenance
from warpwell.targets.arguments import viewed
from warpwell.targets.compiler import run_cuda
from warpwell.targets.compiler.hooks import intrinsics_for
from warpwell.targets.device import linked_functions

pytestmark = pytest.mark.ptx


def record_view():
    """Records of a float32 and a bfloat16, packed after a byte."""
    x, h = view("<f4", writable=True, aligned=False).static, view("bfloat16", writable=True, aligned=False).static
    fields = ViewField("x", 1, (), (), replace(x, stride=7)), ViewField("h", 5, (), (), replace(h, stride=7))
    static = replace(x, dtype="V7", stride=7, fields=fields)
    return ArrayView(static, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(static)})


def view(dtype="<i8", ndim=1, *, cached=True, writable=False, full=False, aligned=True, direct_mapped=False):
    stride = item_of(dtype).stored.itemsize
    static = ViewStatic(dtype, ndim, cached, writable, full, aligned, stride, direct_mapped=direct_mapped)
    return ArrayView(static, {n: (0 if c is None else (0,) * c) for n, c in ArrayView.layout(static)})


@ww.kernel
def read_one(a, out):
    i = gpu.grid(1)
    out[i] = a[out[i]]


@ww.kernel
def read_many(a, out, rounds):
    i = gpu.grid(1)
    total = 0
    for k in range(rounds):
        total += a[i + k * 4096]
    out[i] = total


@ww.kernel
def write_all(a, out):
    i = gpu.grid(1)
    a[i] = out[i]
    gpu.atomic_add(a, i, out[i])
    a.prefetch(i)
    if a.pin(i):
        a.unpin(i)


@ww.kernel
def mark_pages(pages, items):
    i = gpu.grid(1)
    pages.add(items[i])
    pages.add_range(items[i], items[i] + 100)


def test_page_sets_compile_and_mark_by_one_atomic():
    fields = dict.fromkeys(("bits", "space", "origin", "step", "size", "shift"), 0)
    text = run_cuda.ptx(mark_pages, (PageSetView((True, 4), fields), np.zeros(1, np.int64)))
    assert re.search(r"atom\.relaxed\.gpu\S*\.or\.b64|atom\.or\S*\.b64|atom\S*\.or\.b64", text)
    nothing = run_cuda.ptx(mark_pages, (PageSetView((False, 4), fields), np.zeros(1, np.int64)))
    assert ".or.b64" not in "".join(line for line in nothing.splitlines() if "atom" in line)


@ww.kernel
def copy_item(a, out):
    i = gpu.grid(1)
    a[i] = a[i + 1] + out[i]


@ww.kernel
def copy_field(a, out):
    i = gpu.grid(1)
    a["h"][i] = a["x"][i] + out[i]


@ww.kernel
def read_two(a, out):
    i, j = gpu.grid(2)
    out[i] = a[i, j] + a.shape[1] + len(a)


@ww.kernel
def histogram(a, counts):
    i = gpu.grid(1)
    if i < a.size and not gpu.failed():
        gpu.atomic_add(counts, a[i], 1)


OUT = np.zeros(4, np.int64)
FOUR = np.zeros(4, np.float32)
WORD = np.int64(0)


@pytest.mark.quick("read_one-arguments0-1", "write_all-arguments8-1", "flush_frames-arguments17-1")
@pytest.mark.parametrize(
    ("kernel", "arguments", "dims"),
    [
        (read_one, (view(), OUT), 1),
        (read_one, (view("<u2"), OUT), 1),
        (read_one, (view("|b1"), OUT), 1),
        (read_one, (view(aligned=False), OUT), 1),
        (read_one, (view(full=True), OUT), 1),
        (read_one, (view(direct_mapped=True, full=True), OUT), 1),
        (read_one, (view(cached=False), OUT), 1),
        (write_all, (view("<f4", writable=True), FOUR), 1),
        (write_all, (view(writable=True, full=True), OUT), 1),
        (write_all, (view(writable=True, cached=False), OUT), 1),
        (write_all, (view(), OUT), 1),
        (read_two, (view(ndim=2), OUT), 2),
        (histogram, (view(), OUT), 1),
        (copy_item, (view("<f2", writable=True), FOUR), 1),
        (copy_item, (view("bfloat16", writable=True, cached=False), FOUR), 1),
        (copy_field, (record_view(), FOUR), 1),
        (maintenance.flush_frames, (WORD,) * 6, 1),
        (maintenance.settle_queues, (WORD,) * 2, 1),
        (known_pages.look_rows, (WORD,) * 7, 1),
        (known_pages.publish_rows, (WORD,) * 12, 1),
        (known_pages.touch_rows, (WORD,) * 6, 1),
        (known_pages.evict_rows, (WORD,) * 4, 1),
        (maintenance.pin_pages, (WORD,) * 4, 1),
        (maintenance.unpin_pages, (WORD,) * 5, 1),
        (maintenance.evict_pages, (WORD,) * 4, 1),
        (maintenance.drop_frames, (WORD,) * 5, 1),
        (host_access.gather_units, (view("<u8", ndim=2), OUT, WORD, np.zeros(4, np.uint64)), 1),
        (host_access.scatter_units, (view("<u8", ndim=2, writable=True), OUT, WORD, np.zeros(4, np.uint64)), 1),
    ],
)
def test_kernels_compile_to_ptx(kernel, arguments, dims):
    text = run_cuda.ptx(kernel, arguments, dims=dims)
    assert ".visible .entry" in text and "sm_90" in text


def test_kernels_read_columns_and_do_not_write_them():
    column = pytest.importorskip("polars").Series([1.0, 2.0])
    values = viewed(read, (column, OUT, np.zeros(2)))
    assert ".visible .entry" in run_cuda.ptx(read, values)
    for kernel, says in ((write, "readonly"), (add, "read-only")):
        with pytest.raises(errors.CompileError, match=says):
            run_cuda.ptx(kernel, viewed(kernel, (column, OUT, np.zeros(2))))


LINKED = {"access", "pin_long", "unpin_long", "prefetch_pages", "latch_index"}


@pytest.mark.quick()
@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["named", "others"])
def test_linked_functions_compile_to_ptx_under_their_symbol(named):
    intrinsics_for("cuda")
    from warpwell.targets.compiler.cuda_lowerings import CudaIntrinsics
    from warpwell.targets.compiler.machine_code import symbol_of

    functions = linked_functions()
    assert {f.__name__ for f in functions} >= LINKED
    for function in [f for f in functions if (f.__name__ in LINKED) is named]:
        with run_cuda.without_gpu((9, 0)):
            text = CudaIntrinsics.ptx_of(function, (9, 0))
        assert re.search(rf"\.visible \.func .*\b{symbol_of(function)}\b", text), function


def test_ptx_of_linked_functions_is_compiled_once(tmp_path, monkeypatch):
    """Each process on a GPU compiled 10 s of PTX."""
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    intrinsics_for("cuda")
    from warpwell.targets.compiler import cuda_lowerings

    texts = []

    def compile_ptx(function, cc):
        texts.append(f"// {function.__name__}, sm_{cc[0]}{cc[1]}, compilation {len(texts)}")
        return texts[-1]

    def stored(function, cc):
        return zlib.decompress(cuda_lowerings.intrinsics.compressed_ptx(function, cc)).decode()

    monkeypatch.setattr(cuda_lowerings.CudaIntrinsics, "ptx_of", staticmethod(compile_ptx))
    hold, prefetch = (
        next(f for f in linked_functions() if f.__name__ == name) for name in ("pin_long", "prefetch_pages")
    )
    requests = [(hold, (9, 0)), (hold, (8, 0)), (prefetch, (9, 0))]
    for _ in range(2):
        assert [stored(*request) for request in requests] == texts
    assert len(texts) == 3
    for path in tmp_path.rglob("*.ptx.z"):
        path.write_bytes(path.read_bytes()[:-1])
    assert "compilation 3" in stored(hold, (9, 0)), "a damaged file is not used"
    assert "compilation 3" in stored(hold, (9, 0))
    monkeypatch.setattr(cuda_lowerings, "_compiler_digest", lambda: None)
    assert "compilation 4" in stored(hold, (9, 0)), "the version of the compiler is unknown"


def _instructions(text: str) -> list[str]:
    """Return the statements of the entry."""
    entry = text[text.index(".visible .entry") :]
    body = entry[entry.index("{") :]
    return [line.strip() for line in body.splitlines()]


@pytest.mark.quick()
def test_the_hit_loop_acquires_the_word_then_the_item_and_reloads_the_same_word():
    code = _instructions(run_cuda.ptx(read_many, (view(), OUT, WORD)))
    loads = r"ld\.acquire\.gpu\.global(?:\.L2::cache_hint)?\.u64 (%\w+), \[(%\w+)\]"
    acquires = [(k, *m.groups()) for k, line in enumerate(code) if (m := re.search(loads, line))]
    relaxed = [
        (k, *m.groups())
        for k, line in enumerate(code)
        if (m := re.match(r"ld\.relaxed\.gpu\.global\.u64 (%\w+), \[(%\w+)\];", line))
    ]
    shared = {address for _, _, address in acquires} & {address for _, _, address in relaxed}
    for word in shared:
        # The reload is the first relaxed load from the address of the word.
        reload = next(k for k, _, loaded_from in relaxed if loaded_from == word)
        # Look only at its basic block, because a block that reads a page's own frame may stand between.
        start = max(k for k in range(reload) if not code[k] or code[k].startswith("$L"))
        items = [k for k, _, loaded_from in acquires if start < k < reload and loaded_from != word]
        assert len(items) == 1, "exactly the item is acquired between the word and its reload"
        assert not any(start < k < reload for k, *_ in relaxed)
        assert not any(line.startswith(("call", "st.", "atom")) for line in code[start:reload])
    assert len(shared) >= 1
    # The acquire of the word is inside the loop: after the reload, a branch goes back to a label before the acquire.
    labels = {line[:-1]: k for k, line in enumerate(code) if re.fullmatch(r"\$L\w+:", line)}
    backward = [
        k
        for k, line in enumerate(code)
        if (m := re.search(r"bra(?:\.uni)?\s+(\$L\w+);", line)) and labels.get(m[1], k) < k
    ]
    assert any(labels[re.search(r"(\$L\w+);", code[k])[1]] <= acquires[0][0] for k in backward)
    # the slow path is a call and nothing else: no local memory is touched
    assert not any("local" in line for line in code)


def test_a_page_with_a_frame_of_its_own_is_acquired_once_or_never():
    code = _instructions(run_cuda.ptx(read_many, (view(direct_mapped=True), OUT, WORD)))
    acquires = [k for k, line in enumerate(code) if line.startswith("ld.acquire.gpu.global.u64")]
    items = [k for k, line in enumerate(code) if line.startswith("ld.relaxed.gpu.global.u64")]
    assert len(acquires) == len(items) >= 1 and not any("ld.global" in line or "local" in line for line in code)
    for word in acquires:
        (loaded,) = re.findall(r"(%\w+), \[", code[word])
        following = [line for line in code[word + 1 :] if not line.startswith("//")]
        assert re.match(rf"and\.b64\s+%\w+, {loaded}, 2;", following[0]), "whether it can be read decides"
        before = [line for line in code[:word] if not line.startswith("//")]
        branch = max(k for k, line in enumerate(before) if " bra" in line)
        assert before[branch].startswith("@%p"), "the word is left out where all pages are there"


@pytest.mark.quick("None")
@pytest.mark.parametrize("block", [None, 64])
def test_bounds_checks_compile_and_are_not_in_other_kernels(block):
    """Rows, additions and records among them; kernels that are compiled without checks contain none."""

    def touch(x, i, r, out):
        x[i, 1] += out[x[i][0]]
        row = x[0] if i > 2 else out
        out[3] = row[1]
        gpu.atomic_add(out, i, r[i]["b"])
        r["a"][i] = out[0]

    kernel = ww.kernel(touch, block=block)
    arguments = (np.zeros((3, 4), np.int64), WORD, np.zeros(3, [("a", "<i8"), ("b", "<i8")]), OUT)
    plain = run_cuda.ptx(kernel, arguments)
    checked = run_cuda.ptx(kernel.checked_variant(4), (*arguments, WORD))
    assert "cas" not in plain and "checked" not in plain
    assert checked.count("atom.acq_rel.gpu.global.cas.b64") >= 4


@pytest.mark.slow
def test_warp_statements_are_convergent():
    intrinsics_for("cuda")
    from warpwell.targets.compiler.cuda_lowerings import CudaIntrinsics

    with run_cuda.without_gpu((9, 0)):
        text = CudaIntrinsics.ptx_of(next(f for f in linked_functions() if f.__name__ == "access"), (9, 0))
    for statement in ("vote.sync.ballot", "shfl.sync.idx", "bar.warp.sync", "activemask", "fence.acq_rel.gpu"):
        assert statement in text


@pytest.mark.slow
def test_the_fence_stands_between_the_barrier_and_the_first_store_of_a_fill():
    intrinsics_for("cuda")
    from warpwell.targets.compiler.cuda_lowerings import CudaIntrinsics

    with run_cuda.without_gpu((9, 0)):
        text = CudaIntrinsics.ptx_of(next(f for f in linked_functions() if f.__name__ == "access"), (9, 0))
    code = [line.strip() for line in text.splitlines()]
    fences = [k for k, line in enumerate(code) if line.startswith("fence.acq_rel.gpu")]
    fills = 0
    for k in fences:
        after = next(i for i in range(k + 1, len(code)) if code[i].startswith(("st.relaxed", "st.release", "atom.")))
        if "v2" not in code[after]:
            continue  # the fence before a thread takes turns in a queue
        fills += 1
        before = next(i for i in range(k - 1, -1, -1) if code[i].startswith(("bar.warp.sync", "st.", "atom.")))
        assert code[before].startswith("bar.warp.sync")
    # a host page, a page of a command, a prefetched page: each copy into a frame has its fence
    assert fills == 3


def test_who_stores_under_a_pin_acquires_the_word_then_executes_one_fence():
    intrinsics_for("cuda")
    from warpwell.targets.compiler.cuda_lowerings import CudaIntrinsics

    access = next(f for f in linked_functions() if f.__name__ == "access")
    with run_cuda.without_gpu((9, 0)):
        text = CudaIntrinsics.ptx_of(access, (9, 0))
    # its own body comes first; the functions that it calls come after it
    text = text[re.search(r"\.visible \.func .*\n?.*warpwell_cache_access_access\(\n", text).end() :]
    code = [line.strip() for line in text[: text.index("\n}")].splitlines()]
    (fence,) = (k for k, line in enumerate(code) if line.startswith("fence."))
    assert code[fence] == "fence.acq_rel.gpu;"
    (acquire,) = (k for k, line in enumerate(code) if line.startswith("ld.acquire.gpu.global.u64"))
    changes = [k for k, line in enumerate(code) if re.match(r"(st|atom)\.relaxed\.gpu", line)]
    assert len(changes) == 8 and acquire < fence < min(changes)  # items of 1, 2, 4 and 8 bytes; four additions
    between = code[acquire + 1 : fence]
    assert not any(line.startswith(("call", "st.", "atom", "bar")) for line in between)
    # Only loads skip the fence: the branch before the fence goes to the line after it.
    branches = [line for line in between if " bra" in line]
    assert len(branches) == 1 and re.search(r"bra \t?(\$L\w+);", branches[0])[1] + ":" in code[fence + 1 : fence + 5]
    # The pin is released in the word that was acquired.
    word = re.search(r"\[(%\w+)\]", code[acquire])[1]
    assert any(line.startswith("atom.acq_rel.gpu.global.cas.b64") and f"[{word}]" in line for line in code)
