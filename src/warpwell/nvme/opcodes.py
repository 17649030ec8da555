"""Opcodes of the NVMe I/O command sets.

The two sets share numbers: which set an opcode belongs to follows from the namespace that the command names.

Source: NVM Express NVM Command Set and Key Value Command Set specifications, "Opcodes for ... Commands".
"""

from __future__ import annotations

# NVM command set
FLUSH = 0x00
WRITE = 0x01
READ = 0x02
WRITE_UNCORRECTABLE = 0x04
COMPARE = 0x05
WRITE_ZEROES = 0x08
DATASET_MANAGEMENT = 0x09

# Key-value command set; FLUSH is common to both
KV_STORE = 0x01
KV_RETRIEVE = 0x02
KV_LIST = 0x06
KV_DELETE = 0x10
KV_EXIST = 0x14

_NVM_NAMES = {
    FLUSH: "flush",
    WRITE: "write",
    READ: "read",
    WRITE_UNCORRECTABLE: "write uncorrectable",
    COMPARE: "compare",
    WRITE_ZEROES: "write zeroes",
    DATASET_MANAGEMENT: "dataset management",
}

_KEY_VALUE_NAMES = {
    FLUSH: "flush",
    KV_STORE: "store",
    KV_RETRIEVE: "retrieve",
    KV_LIST: "list",
    KV_DELETE: "delete",
    KV_EXIST: "exist",
}


def opcode_name(opc: int) -> str:
    """Name an opcode of the NVM command set, for messages.

    Parameters
    ----------
    opc : int
        Opcode, 0 to 255.

    Returns
    -------
    str
        For example ``"read"``, or ``"opcode 0x7f"`` for one that is not known.
    """
    return _NVM_NAMES.get(opc, f"opcode 0x{opc:02x}")


def key_value_opcode_name(opc: int) -> str:
    """Name an opcode of the key-value command set, for messages.

    Parameters
    ----------
    opc : int
        Opcode, 0 to 255.

    Returns
    -------
    str
        For example ``"store"``, or ``"opcode 0x7f"`` for one that is not known.
    """
    return _KEY_VALUE_NAMES.get(opc, f"opcode 0x{opc:02x}")
