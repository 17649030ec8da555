"""The arguments of ``warpwell kv``."""

from __future__ import annotations

import argparse

from ..arguments import Commands, command, json_option

DURABILITIES = ("commit", "always", "none")


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``kv`` and its commands."""
    kv = commands.add_parser("kv", help="fill, read and check key-value stores")
    verbs = kv.add_subparsers(metavar="COMMAND", required=True)

    load = command(verbs, "load", "kv.load", "load records into a store, in bounded memory")
    load.add_argument("source", metavar="SRC", help="folder of files, .npz, LMDB environment or saved data set")
    load.add_argument("store", metavar="STORE", help="folder of the store, usually NAME.kv")
    load.add_argument(
        "--keys",
        choices=("name", "number", "hash"),
        help="the record's name (1 to 16 bytes), its number, or a 16-byte hash of its name",
    )
    load.add_argument("--key-field", metavar="NAME", help="array or column of keys (.npz: keys, if there is one)")
    load.add_argument("--fields", metavar="A,B", help="arrays or columns to take (default: all)")
    load.add_argument("--database", metavar="NAME", help="named database of an LMDB environment")
    there = load.add_mutually_exclusive_group()
    there.add_argument("--append", action="store_true", help="add to an existing store")
    there.add_argument("--overwrite", action="store_true", help="replace an existing store")
    load.add_argument(
        "--durability",
        choices=DURABILITIES,
        default="commit",
        help="when writes of the new store become durable (default commit)",
    )
    load.add_argument("--segment-bytes", default="256MiB", metavar="SIZE", help="of a value file (default 256MiB)")
    json_option(load)

    get = command(verbs, "get", "kv.get", "write the value of a key to stdout")
    _store(get)
    get.add_argument("key", metavar="KEY", help="an integer (8-byte key), or else text")
    get.add_argument(
        "--type",
        choices=("auto", "int", "text", "hex"),
        default="auto",
        help="what KEY is (default auto: an integer if it looks like one, or text if there is no such integer)",
    )
    get.add_argument("--field", metavar="NAME", help="only this field, as raw items")
    get.add_argument("--out", metavar="FILE", help="write there instead")
    json_option(get)

    dump = command(verbs, "dump", "kv.dump", "write all records to a folder or a .npz file")
    _store(dump)
    dump.add_argument("out", metavar="OUT", help="NAME.npz, or a folder (a file for each value; a .npy for each field)")
    dump.add_argument("--prefix", default="", metavar="TEXT", help="only keys that begin with it")
    dump.add_argument(
        "--names",
        choices=("auto", "text", "int", "hex"),
        default="auto",
        help="how files in a folder are named (default auto: the first that fits all keys)",
    )
    dump.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    json_option(dump)

    stats = command(verbs, "stats", "kv.stats", "show what a store holds")
    _store(stats)
    json_option(stats)

    verify = command(verbs, "verify", "kv.verify", "read and check all data (exit code 1: some is damaged)")
    _store(verify)
    json_option(verify)

    salvage = command(
        verbs,
        "salvage",
        "kv.salvage",
        "copy the undamaged records of a damaged store into a new one (exit code 1: some were lost)",
    )
    _store(salvage)
    salvage.add_argument("target", metavar="NEW", help="folder of the new store; STORE is only read")
    json_option(salvage)

    compact = command(verbs, "compact", "kv.compact", "give back the space of values that were replaced or deleted")
    _store(compact)
    compact.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="of dead bytes from which on a value file is rewritten (default 0.5)",
    )
    json_option(compact)


def _store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="folder of the store")
