"""The ``warpwell`` command.

::

    main.py     parses the arguments and runs a command; ``completion``
    _common.py  what commands share: parsers, options, output, errors and Ctrl-C
    info.py     ``info``: devices, versions, and how to install what is missing
    compile.py  ``compile``: use all features once, so that their code is compiled
    graph.py    ``graph ...``
    kv.py       ``kv ...``
    table.py    ``table ...``
    sched.py    ``sched ...``
    share.py    ``share``
    pool.py     ``run`` and ``pool ...``
    drive.py    ``drive ...``

The module of a group has `add`, which declares its commands and their options, and a function for each command, which
takes the parsed arguments and returns the exit code. These functions import what they need, so that ``--help`` answers
at once.
"""

from .main import main

__all__ = ["main"]
