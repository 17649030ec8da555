"""The address of a service: a socket in a folder to which only its user may write, and a lock for one service."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

from ... import errors
from ..._os import lock_descriptor
from ..._settings import settings

MAX_PATH = 107
"""Maximum length of a socket's path, in bytes: Linux has 108, with the final zero."""


def default_path() -> Path:
    """Return the path of the socket of this user's service.

    ``WARPWELL_SOCKET``, if it is set; otherwise in ``$XDG_RUNTIME_DIR``, if that is private; otherwise in a folder of
    the user in the system's folder for temporary files.
    """
    if chosen := settings.socket:
        return chosen
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime) and _is_private(Path(runtime)):
        return Path(runtime) / "warpwell" / "scheduler.sock"
    return Path(tempfile.gettempdir()) / f"warpwell-{os.getuid()}" / "scheduler.sock"


def checked_path(path: str | os.PathLike[str] | None) -> Path:
    """Return the absolute path of a socket; raise ArgumentError if the path is too long."""
    found = Path(path if path is not None else default_path()).absolute()
    if len(os.fsencode(found)) > MAX_PATH:
        text = f"{found} is too long for a socket (at most {MAX_PATH} bytes): pass a shorter --socket"
        raise errors.ArgumentError(text, name="socket")
    return found


def prepare(path: Path, group: int | None) -> None:
    """Create the folder of a socket, or check the existing one.

    Raises
    ------
    ServiceError
        Other users can write to the folder, and could replace the socket to receive the data of clients; the group
        cannot enter the folder; or a file that is not a socket has the name of the socket.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True)
        if group is not None:
            os.chown(folder, -1, group)
            folder.chmod(0o750)
    except FileExistsError:
        pass
    found = os.lstat(folder)
    own = found.st_uid in (os.getuid(), 0)
    private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    # In a sticky folder users cannot remove the files of others, but any user may create the socket first.
    if not stat.S_ISDIR(found.st_mode) or not own or not private:
        mode = "700" if group is None else "750"
        step = "Name" if not own or found.st_mode & stat.S_ISVTX else f"chmod {mode} it, or name"
        text = f"{folder} must be your folder, closed to writes of other users: they could replace the socket there"
        raise errors.ServiceError(f"{text}. {step} another --socket")
    if group is not None and not found.st_mode & (stat.S_IXGRP if found.st_gid == group else stat.S_IXOTH):
        text = f"{folder} is closed to the group of this service: `chgrp {group}` and `chmod 750` it"
        raise errors.ServiceError(text)
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise errors.ServiceError(f"{path} is not a socket, and a service would replace it: pass another --socket")


def lock(path: Path) -> int:
    """Lock a socket's path; return an open file, which holds the lock until it is closed.

    Raise ServiceError if another service has it.
    """
    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not lock_descriptor(handle, deadline=0.0):
        os.close(handle)
        raise errors.ServiceError(f"a service already listens at {path}: pass another --socket")
    return handle


def number_of(kind: str, name: str) -> int:
    """Return the number of a "group" or a "user" of this system; raise ArgumentError if the name is unknown."""
    try:
        if name.isdecimal():
            return int(name)
        return grp.getgrnam(name).gr_gid if kind == "group" else pwd.getpwnam(name).pw_uid
    except KeyError:
        where = {"group": "group", "user": "passwd"}[kind]
        raise errors.ArgumentError(f"unknown {kind} {name!r}: see `getent {where}`", name=kind) from None


def own_group(name: str) -> int:
    """Return the number of a group of this process; raise ArgumentError if this process is not a member."""
    number = number_of("group", name)
    if os.geteuid() != 0 and number not in (os.getegid(), *os.getgroups()):
        text = f"this process is not in group {name!r} (see `id`): a user is in a new group after the next login"
        raise errors.ArgumentError(text, name="group")
    return number


def _is_private(folder: Path) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
