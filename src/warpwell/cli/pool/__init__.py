"""The ``warpwell run`` and ``warpwell pool`` commands.

arguments.py  the options of all commands
run.py        ``run``: a program with a pool; how many agents each host gets
info.py       ``pool info``: starts a pool, and shows its devices
top.py        ``pool top``: what the agents of a running program do, and the CUDA programs that they serve
notebook.py   ``pool notebook``: writes a kernel for Jupyter
"""
