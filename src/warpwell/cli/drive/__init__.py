"""The ``warpwell drive`` commands.

arguments.py  the options of all commands
list.py       ``drive list``: the NVMe drives of this machine, and who uses them; opens none
info.py       ``drive info``: one of them; if Warpwell may use it, what the drive says of itself
bind.py       ``drive bind``: takes a drive that nobody uses from the kernel
unbind.py     ``drive unbind``: gives it back
format_array.py ``drive format-array``: makes an array on a drive, if nobody's data are there
bench.py      ``drive bench``: how fast kernels read from a drive, or from one of QEMU's
"""
