"""The number of the futex system call."""

import os

FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(os.uname().machine, 0)
"""Number of the futex system call, or 0 if it is not known for this processor."""
