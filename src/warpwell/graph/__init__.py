"""Graphs on disk in compressed sparse rows: conversion, generation, traversal."""

from warpwell.graph.build import build
from warpwell.graph.components import CCResult, connected_components
from warpwell.graph.convert import convert
from warpwell.graph.generate import generate
from warpwell.graph.graph import Graph
from warpwell.graph.loaded import LoadedGraph
from warpwell.graph.search import BFSResult, bfs

__all__ = [
    "BFSResult",
    "CCResult",
    "Graph",
    "LoadedGraph",
    "bfs",
    "build",
    "connected_components",
    "convert",
    "generate",
]
