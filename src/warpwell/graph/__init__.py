"""Graphs on disk in compressed sparse rows: conversion, generation, traversal."""

from warpwell.graph.build import build
from warpwell.graph.convert import convert
from warpwell.graph.generate import generate
from warpwell.graph.graph import Graph

__all__ = ["Graph", "build", "convert", "generate"]
