"""The ``warpwell sched`` commands.

Each module adds its command and runs it::

    arguments.py   the commands and their modules
    serve.py       ``serve`` and ``status``: a service for several processes
    turns.py       ``end`` and ``limit``: programs that take turns
    explain.py     ``explain``: a log as sentences, a timeline, or metrics
"""
