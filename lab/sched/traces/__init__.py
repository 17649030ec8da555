"""Traces: kernels and their arrivals, from public files, from tables, and built in.

=============  ==========================================================================================
rows.py        CSV files: columns and numbers checked, with file, line and column in every error
trace.py       a trace: applications (chains of kernels) and their arrivals; makes the requests of a run
orion.py       kernels of neural networks, as Orion's authors measured them
arrivals.py    times of requests: Azure's and Alibaba's files
synthetic.py   mixes of kernels and arrivals that need no file
table.py       Warpwell's own trace, a CSV file with a line for each kernel
recipe.py      the parameters of a trace, as plain data
=============  ==========================================================================================
"""
