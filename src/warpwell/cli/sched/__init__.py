"""The ``warpwell sched`` commands.

Each module adds its command and runs it::

    arguments.py   the commands and their modules
    simulate.py    ``simulate``: policies on a trace, in virtual time
    trace.py       ``trace``: what a trace holds, and a trace as a table
    run.py         ``run``: kernels on this machine's device, under one policy after another
    serve.py       ``serve`` and ``status``: a service for several processes
    turns.py       ``end`` and ``limit``: programs that take turns
    explain.py     ``explain``: a log as sentences, a timeline, or metrics
    fit.py         ``fit``: constants of the cost formula, from measurements
"""
