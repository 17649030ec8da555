"""Physical region pages: how a command names its data where these are longer than a page of memory.

prp1 is the address of the first byte. What follows in further pages is named by prp2: nothing (the data end in the
first page), the address of the second page (they end there), or the address of a *list* of addresses of pages. A list
that ends at the end of its page is whole; here none crosses a page, so none needs the pointer that chains lists.

Figures: NVM Express Base Specification, "PRP Entry Layout", "PRP List Layout".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PAGE = 4096
"""Bytes of a page of memory: CC.MPS is 0."""
LIST_ENTRIES = PAGE // 8
"""Addresses in a page of a list."""
MAX_TRANSFER = LIST_ENTRIES * PAGE
"""Bytes of page-aligned data that one command can name with one list, and one page to spare: 2 MiB."""


def list_entries(address: int, nbytes: int) -> int:
    """Return how many addresses the list of a transfer has: 0 where prp2 needs none.

    Parameters
    ----------
    address : int
        Of the first byte.
    nbytes : int
        1 or more.
    """
    pages = (address % PAGE + nbytes + PAGE - 1) // PAGE
    return 0 if pages <= 2 else pages - 1


def data_pointers(address: int, nbytes: int, list_address: int) -> tuple[int, int, list[int]]:
    """Return prp1, prp2 and the content of the list for contiguous memory.

    Parameters
    ----------
    address : int
        DMA address of the first byte, a multiple of 4.
    nbytes : int
        1 or more.
    list_address : int
        DMA address of the list, a multiple of 8; unused where the list is empty.

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


def ranges(prp1: int, prp2: int, nbytes: int, load: Callable[[int, int], Sequence[int]]) -> list[tuple[int, int]]:
    """Return what a controller transfers: ``(address, bytes)`` in order (host; tests and scripted controllers).

    Parameters
    ----------
    prp1, prp2, nbytes : int
        Of the command.
    load : callable
        ``load(address, n)`` returns the `n` 64-bit words at an address.

    Raises
    ------
    ValueError
        An address has an offset that is not allowed: that of prp1 is a multiple of 4, of prp2 as a list one of 8, and
        those of further pages are 0.
    """
    if prp1 % 4:
        raise ValueError(f"prp1 {prp1:#x} is no multiple of 4")
    found = [(prp1, min(nbytes, PAGE - prp1 % PAGE))]
    rest = nbytes - found[0][1]
    pages = [prp2] if 0 < rest <= PAGE else []
    if rest > PAGE:
        at, left = prp2, -(-rest // PAGE)
        while left:
            if at % 8:
                raise ValueError(f"the list at {at:#x} is no multiple of 8")
            here = (PAGE - at % PAGE) // 8
            words = list(load(at, min(left, here)))
            if left > here:  # the last address of the page is that of the next list
                at = words.pop()
            pages += words
            left -= len(words)
    for page in pages:
        if page % PAGE:
            raise ValueError(f"the page {page:#x} is not aligned")
        found.append((page, min(rest, PAGE)))
        rest -= found[-1][1]
    return found
