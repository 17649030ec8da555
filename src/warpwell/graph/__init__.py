"""Graphs on disk in compressed sparse rows: conversion, generation, traversal.

Files, in the order in which edges meet them:

- convert.py        `convert`: build a graph from a file of edges
- read.py           read edge lists, tables and matrices of other programs
- names.py          names of vertices
- generate.py       `generate`: the graphs of the GAP benchmark
- build.py          `build`: write a graph on disk from chunks of edges
- external.py       sort edges in bounded memory
- order.py          the order of degree, and the first neighbors of each vertex
- graph.py          `Graph`: a graph on disk, checked when it is opened
- loaded.py         `LoadedGraph`: a graph that kernels can traverse
- algorithms/       `bfs`, `connected_components`, `sssp`, `pagerank`, `triangles`
"""

from warpwell.graph.algorithms.components import connected_components
from warpwell.graph.algorithms.pagerank import pagerank
from warpwell.graph.algorithms.search import bfs
from warpwell.graph.algorithms.shortest_paths import sssp
from warpwell.graph.algorithms.triangles import triangles
from warpwell.graph.build import build
from warpwell.graph.convert import convert
from warpwell.graph.generate import generate
from warpwell.graph.graph import Graph
from warpwell.graph.loaded import LoadedGraph

__all__ = [
    "Graph",
    "LoadedGraph",
    "bfs",
    "build",
    "connected_components",
    "convert",
    "generate",
    "pagerank",
    "sssp",
    "triangles",
]
