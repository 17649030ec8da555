"""The wire format of drives: registers, admin commands, Identify, page lists, status codes of all sets."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lab.drives.scripted_drive import prp_ranges
from warpwell import nvme
from warpwell.nvme import controller, identify, prp, status
from warpwell.nvme.wire import layout


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


@given(unsigned(16), unsigned(8), unsigned(4), unsigned(8), unsigned(4), unsigned(4))
def test_capabilities(mqes: int, to: int, dstrd: int, css: int, min_size: int, max_size: int) -> None:
    unrelated = 1 << 16 | 1 << 36 | 1 << 45 | 1 << 57  # CQR, NSSRS, BPS, CMBS
    cap = mqes | to << 24 | dstrd << 32 | css << 37 | min_size << 48 | max_size << 52
    for value in (cap, cap | unrelated):
        assert controller.cap_entries(value) == mqes + 1
        assert controller.cap_timeout(value) == to / 2
        assert controller.cap_stride(value) == 4 << dstrd
        assert controller.cap_command_sets(value) == css
        assert controller.cap_smallest_page(value) == 1 << 12 + min_size


def test_configuration_and_status() -> None:
    assert controller.cc_value(enable=True) == 0x460001  # IOCQES 4, IOSQES 6, the rest 0
    assert controller.cc_value(enable=True, shutdown=controller.SHUTDOWN_NORMAL) == 0x464001
    assert controller.cc_value(enable=False) == 0x460000
    assert controller.aqa_value(32) == 0x1F001F
    assert [controller.csts_ready(x) for x in (0, 1, 2, 3)] == [False, True, False, True]
    assert controller.csts_fatal(controller.ALL_ONES) and not controller.csts_fatal(0xD)
    assert controller.csts_shutdown(0b1001) == controller.SHUTDOWN_COMPLETE
    assert controller.vs_text(0x00010400) == "1.4.0"


@given(st.integers(0, 65535), unsigned(4))
def test_doorbells_are_neighbors(queue: int, dstrd: int) -> None:
    stride = 4 << dstrd
    first = controller.submission_doorbell(queue, stride)
    assert first == 0x1000 + 2 * queue * stride
    assert controller.completion_doorbell(queue, stride) == first + stride
    assert controller.submission_doorbell(queue + 1, stride) == first + 2 * stride


@given(st.integers(1, 65535), st.integers(2, 65536), st.integers(0, 2**52 - 1).map(lambda page: page * 4096))
def test_queue_commands(qid: int, entries: int, address: int) -> None:
    cq = controller.create_completion_queue(qid, entries, address)
    sq = controller.create_submission_queue(qid, entries, address, qid)
    for command, opc in ((cq, controller.CREATE_CQ), (sq, controller.CREATE_SQ)):
        assert (command["opc"], command["prp1"]) == (opc, address)
        assert (int(command["cdw10"]) & 0xFFFF, int(command["cdw10"]) >> 16) == (qid, entries - 1)
        assert int(command["cdw11"]) & 0xFFFF == 1  # contiguous, no interrupts
    assert int(sq["cdw11"]) >> 16 == qid and int(cq["cdw11"]) >> 16 == 0
    for command in (controller.delete_submission_queue(qid), controller.delete_completion_queue(qid)):
        assert command["cdw10"] == qid


@given(st.integers(1, 65535), unsigned(16), unsigned(16))
def test_queues_are_granted(requested: int, submission: int, completion: int) -> None:
    command = controller.set_queues(requested)
    assert (command["cdw10"], command["cdw11"]) == (7, (requested - 1) * 0x10001)
    assert controller.queues_granted(completion << 16 | submission) == min(submission, completion) + 1


def test_identify_names_structure_namespace_and_address() -> None:
    command = controller.identify(identify.CNS_ACTIVE_NAMESPACES, 0x1000, nsid=3)
    assert (command["opc"], command["nsid"], command["cdw10"], command["prp1"]) == (6, 3, 2, 0x1000)


@given(unsigned(4), unsigned(2), st.booleans(), unsigned(16), st.integers(0, 255), unsigned(8))
@example(15, 3, True, 65535, 255, 255)
def test_block_formats(low: int, high: int, extended: bool, metadata: int, shift: int, dps: int) -> None:
    data = bytearray(4096)
    data[26] = low | extended << 4 | high << 5
    data[29] = dps
    at = 128 + 4 * (low | high << 4)
    data[at : at + 4] = metadata.to_bytes(2, "little") + bytes([shift, 3])
    form = identify.block_format(identify.namespace_of(bytes(data)))
    assert form == identify.BlockFormat(1 << shift if 9 <= shift < 64 else 0, metadata, extended, dps & 7)


@given(st.lists(st.integers(1, 0xFFFFFFFE), max_size=1024, unique=True).map(sorted))
def test_namespace_lists_end_with_zero_or_with_the_page(ids: list[int]) -> None:
    data = np.zeros(1024, "<u4")
    data[: len(ids)] = ids
    assert identify.namespace_ids(data.tobytes()) == ids


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 200]), st.integers(1, 255)), max_size=6), st.integers(0, 255))
def test_command_sets_are_found_among_descriptors(descriptors: list[tuple[int, int]], csi: int) -> None:
    raw = b"".join(bytes([kind, length, 0, 0]) + b"\x04" * length for kind, length in descriptors)
    assert identify.command_set(raw.ljust(4096, b"\0")) == identify.CSI_NVM
    raw += bytes([4, 1, 0, 0, csi])
    assert identify.command_set(raw.ljust(4096, b"\0")) == csi


@given(st.integers(0, 2**32 - 1), st.integers(1, 256))
def test_any_descriptors_are_read_without_a_fault(seed: int, values: int) -> None:
    raw = np.random.default_rng(seed).integers(0, values, 4096, dtype=np.uint8).tobytes()
    assert 0 <= identify.command_set(raw) <= 255
    assert identify.block_format(identify.namespace_of(raw)).block >= 0
    identify.namespace_ids(raw)
    identify.text_of(identify.controller_of(raw)["mn"])


def test_texts_are_cleaned() -> None:
    data = bytearray(4096)
    data[4:24] = b"S4\xff1".ljust(20)
    assert identify.text_of(identify.controller_of(bytes(data))["sn"]) == "S4?1"


# -- page lists -------------------------------------------------------------------------------------------------------

ADDRESS = st.integers(2**20, 2**40).map(lambda x: x * 4)


def slots_for(entries: int) -> st.SearchStrategy[int]:
    """Addresses of lists that end in their page."""
    return st.integers(0, prp.LIST_ENTRIES - max(entries, 1)).map(lambda k: 0x7000_0000_0000 + 8 * k)


@given(ADDRESS, st.integers(1, 2 << 20), st.data())
def test_a_controller_finds_the_bytes_that_the_host_named(address: int, nbytes: int, data: st.DataObject) -> None:
    entries = prp.list_entries(address, nbytes)
    if entries > prp.LIST_ENTRIES:
        with pytest.raises(ValueError, match="split the transfer"):
            prp.data_pointers(address, nbytes, 0x1000)
        return
    at = data.draw(slots_for(entries))
    prp1, prp2, pages = prp.data_pointers(address, nbytes, at)
    assert len(pages) == entries
    memory = {at + 8 * k: page for k, page in enumerate(pages)}
    found = prp_ranges(prp1, prp2, nbytes, lambda a, n: [memory[a + 8 * k] for k in range(n)])
    assert found[0][0] == address and sum(size for _, size in found) == nbytes
    for (first, size), (second, _) in itertools.pairwise(found):
        assert first + size == second and second % prp.PAGE == 0
    assert (prp2 == 0) == (address % prp.PAGE + nbytes <= prp.PAGE)


@given(st.integers(3, 1500), st.integers(0, prp.LIST_ENTRIES - 2))
def test_lists_that_cross_a_page_are_chained(pages: int, first: int) -> None:
    """The host makes none; a scripted controller still follows what the specification says."""
    data = [0x10_0000_0000 + prp.PAGE * 3 * k for k in range(pages)]
    memory: dict[int, int] = {}
    lists = iter(range(0x20_0000_0000, 0x30_0000_0000, prp.PAGE))
    at = head = next(lists) + 8 * first
    remaining = data[1:]
    while remaining:
        capacity = (prp.PAGE - at % prp.PAGE) // 8
        take = capacity if len(remaining) <= capacity else capacity - 1
        memory |= {at + 8 * k: page for k, page in enumerate(remaining[:take])}
        remaining = remaining[take:]
        if remaining:
            memory[at + 8 * take] = following = next(lists)
            at = following
    found = prp_ranges(data[0], head, pages * prp.PAGE, lambda a, n: [memory[a + 8 * k] for k in range(n)])
    assert found == [(page, prp.PAGE) for page in data]


@pytest.mark.parametrize(("prp1", "prp2", "pages"), [(0x1002, 0, 1), (0x1000, 0x2200, 2), (0x1000, 0x3004, 4)])
def test_odd_offsets_are_wrong(prp1: int, prp2: int, pages: int) -> None:
    nbytes = 4096 * pages
    with pytest.raises(ValueError, match=r"aligned|multiple"):
        prp_ranges(prp1, prp2, nbytes, lambda _, n: [0x5000] * n)


def test_a_list_may_not_cross_its_page() -> None:
    with pytest.raises(ValueError, match="crosses a page"):
        prp.data_pointers(0x10000, 3 * 4096, 0x1FF8)
    assert prp.data_pointers(0x10000, 3 * 4096, 0x1FF0) == (0x10000, 0x1FF0, [0x11000, 0x12000])


# -- layouts and status codes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        (("a", "<u2", 0, 2),),  # 2 bytes in the format, 3 in the range
        (("a", "<u4", 0, 3), ("b", "<u4", 3, 6)),  # two fields share a byte
        (("a", "<u8", 60, 67),),  # past the end
    ],
)
def test_a_table_that_contradicts_itself_is_found_at_import(fields: tuple[tuple[str, str, int, int], ...]) -> None:
    with pytest.raises(ImportError, match="wire struct"):
        layout(*fields, size=64)


@pytest.mark.parametrize(
    ("struct", "size"),
    [(nvme.COMMAND, 64), (nvme.COMPLETION, 16), (identify.CONTROLLER, 4096), (identify.NAMESPACE, 4096)],
)
def test_sizes(struct: np.dtype, size: int) -> None:
    assert struct.itemsize == size


# The ranges of codes that the specifications define, inclusive, by type; and those inside that they reserve.
DEFINED = {
    0: [(0x00, 0x16), (0x18, 0x24), (0x80, 0x89)],
    1: [(0x00, 0x03), (0x05, 0x16), (0x18, 0x2D), (0x80, 0x83), (0xB8, 0xBF)],
    2: [(0x80, 0x88)],
    3: [(0x00, 0x03), (0x60, 0x60), (0x70, 0x71)],
}


@pytest.mark.parametrize("sct", range(8))
def test_every_status_of_every_set_has_words(sct: int) -> None:
    for sc in range(256):
        is_defined = any(first <= sc <= last for first, last in DEFINED.get(sct, []))
        text = status.describe(sct << 8 | sc)
        assert text.startswith("unknown status") != is_defined, text
        assert f"sct {sct} sc 0x{sc:02x}" in text


def test_status_names_differ() -> None:
    assert len(set(status._TEXTS.values())) == len(status._TEXTS)
    assert nvme.describe(nvme.ABORTED_BY_HOST) == "command aborted by host (path, sct 3 sc 0x71)"
