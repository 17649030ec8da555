"""Traces: kernels and when they arrive, from files of others, from our own tables, and built in.

=============  ==========================================================================================
rows.py        CSV files: columns and numbers checked, with file, line and column in every error
trace.py       a trace: applications (chains of kernels) and their arrivals; makes the requests of a run
orion.py       kernels of neural networks, as Orion's authors measured them
arrivals.py    when requests come: Azure's and Alibaba's files
synthetic.py   mixes of kernels and arrivals that need no file
table.py       our own trace, a CSV file with a line a kernel
recipe.py      what a trace is made of, as plain data
=============  ==========================================================================================
"""

from .arrivals import arrivals
from .recipe import CAPACITIES, Recipe
from .trace import Arrival, Arrivals, Trace, TracedApplication, TracedKernel, compose, select

__all__ = [
    "CAPACITIES",
    "Arrival",
    "Arrivals",
    "Recipe",
    "Trace",
    "TracedApplication",
    "TracedKernel",
    "arrivals",
    "compose",
    "select",
]
