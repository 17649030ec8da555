"""``warpwell bench``: micro-benchmarks; what they do is in `warpwell.study.bench`.

- arguments.py  the options
- run.py        runs benchmarks and prints their tables
- picture.py    draws all figures
"""
