"""Bulk walks in kernels, which look up each page of a run of items once.

- calls.py    `fold`, `map` and `fill`, as kernels call them; which variant walks which arrays
- words.py    the variant of `cuda` and `interp`: reads of pages into registers
- buffers.py  the variant of `cpu`: a thread copies a part of a page, and computes from its copy
"""
