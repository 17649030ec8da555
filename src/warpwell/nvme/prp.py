"""Physical region pages (PRP): how a command names data that cross a page of memory.

prp1 is the address of the first byte. prp2 is 0 if the data end in the first page, the address of the second page if
they end there, and otherwise the address of a *list* of page addresses. A list that ends at the end of its page is
complete; here none crosses a page, so none needs the pointer that chains lists.

Source: NVM Express Base Specification, "PRP Entry Layout", "PRP List Layout".
"""

from __future__ import annotations

PAGE = 4096
"""Bytes of a page of memory: CC.MPS is 0."""
LIST_ENTRIES = PAGE // 8
"""Addresses in a page of a list."""
MAX_TRANSFER = LIST_ENTRIES * PAGE
"""Bytes of page-aligned data that one command can name with one list, one page less: 2 MiB."""


def list_entries(address: int, nbytes: int) -> int:
    """Return how many addresses the list of a transfer of `nbytes` (at least 1) has: 0 if prp2 needs no list."""
    pages = (address % PAGE + nbytes + PAGE - 1) // PAGE
    return 0 if pages <= 2 else pages - 1


def data_pointers(address: int, nbytes: int, list_address: int) -> tuple[int, int, list[int]]:
    """Return prp1, prp2 and the contents of the list for contiguous memory.

    Parameters
    ----------
    address : int
        DMA address of the first byte, a multiple of 4.
    nbytes : int
        At least 1.
    list_address : int
        DMA address of the list, a multiple of 8; unused if the list is empty.

    Raises
    ------
    ValueError
        The list has more than `LIST_ENTRIES`, or would cross a page.
    """
    entries = list_entries(address, nbytes)
    if entries > LIST_ENTRIES or (entries and list_address % PAGE + 8 * entries > PAGE):
        raise ValueError(f"a list of {entries} addresses at {list_address:#x} crosses a page: split the transfer")
    second = address - address % PAGE + PAGE
    if entries:
        return address, list_address, [second + PAGE * k for k in range(entries)]
    return address, second if address % PAGE + nbytes > PAGE else 0, []
