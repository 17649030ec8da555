"""The ``warpwell`` command.

In the order in which a command line meets them::

    main.py       parses the arguments, runs the command's module, turns errors into messages and exit codes
    arguments.py  how a command is added: ``command(verbs, name, module, help)``; checks a file to be written
    interrupt.py  Ctrl-C ends a command within a second
    output.py     how a command prints: a table or JSON, progress, notes
    info.py       ``info``: devices, versions, and what is missing
    graph/        ``graph ...``
    kv/           ``kv ...``
    table/        ``table ...``
    sched/        ``sched ...``
    pool/         ``run`` and ``pool ...``
    drive/        ``drive ...``

The module of a command, such as ``kv/load.py``, has ``run(arguments)``, which returns the exit code. It is imported
when the command is run, so that ``--help`` answers at once. The options of a folder's commands are in its
``arguments.py``; those of ``sched`` are in the commands' modules, because they name what the scheduler has.
"""

from .main import main

__all__ = ["main"]
