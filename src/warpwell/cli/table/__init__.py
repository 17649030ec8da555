"""The ``warpwell table`` commands.

arguments.py  the options of all commands
convert.py    ``convert``: write a table's folder
head.py       ``head``: the first rows, and what each column is
query.py      ``query``: rows that match filters
check.py      ``check``: read everything and check it
"""
