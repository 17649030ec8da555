"""Traversals: algorithms on graphs whose edges stay on storage.

- work_items.py      work items of kernels: a vertex and a piece of its neighbors; sets of vertices
- run.py             `Run`: many launches on arrays that are opened to kernels once
- search.py          `bfs`
- components.py      `connected_components`
- shortest_paths.py  `sssp`
- pagerank.py        `pagerank`
- triangles.py       `triangles`
"""
