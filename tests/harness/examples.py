"""How many random examples a test takes: a third of its number in `make test`, all of them in `make thorough`."""

import os


def examples(count: int) -> int:
    """Return the examples that a test with `count` examples takes in this run."""
    return count if os.environ.get("EXAMPLES") == "all" else -(-count // 3)
