"""Tools of the repository, run from its root as ``python -m tools.NAME``. None of them is part of the wheel."""
