"""`Guest`: a small Linux in QEMU, with an IOMMU and NVMe drives, that runs one Python program and shuts down.

The kernel and busybox come from Debian's packages, which `apt-get download` fetches into a folder without installing
them. The initramfs holds both, this Python, the modules that the program imports (found by importing it on the host),
and their shared libraries. QEMU emulates the processor, so KVM is not needed: Python runs after 8 to 20 s.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

QEMU = "qemu-system-x86_64"
INSTALL = "apt-get install qemu-system-x86"
META = "linux-image-cloud-amd64"
"""Debian's package that depends on its newest kernel for virtual machines."""
MODULES = ("vfio-pci", "vfio_iommu_type1", "dm-mod")
KERNEL_OPTIONS = (
    "console=ttyS0 quiet panic=-1 intel_iommu=on tsc=reliable nokaslr mitigations=off "
    "no_timer_check"  # on a busy host the emulated timer is late, and Linux would stop booting
)
SECONDS = 400
"""Timeout of a run in seconds. A run takes one minute on two idle cores, and several minutes on a busy host."""
DOWNLOAD_SECONDS = 100


class CannotRun(Exception):
    """The guest cannot run on this host; the message names the missing packages."""


class Guest:
    """A guest for one program.

    Parameters
    ----------
    program : Path
        A Python file. It is imported on the host to find its modules, and executed as a script in the guest.
    folder : Path
        Folder of the packages and the initramfs.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        if shutil.which(QEMU) is None:
            raise CannotRun(f"the guest needs QEMU: {INSTALL}")
        self.program = program
        self.folder = folder
        self.unpacked = _packages(folder / "packages")
        self.kernel = next((self.unpacked / "boot").glob("vmlinuz-*"))
        self.initramfs = folder / "initramfs"
        with open(self.initramfs, "wb") as file:
            archive(self._files(), file)

    def run(self, drives: dict[str, str], append: str = "") -> str:
        """Boot; return the output of the serial line.

        Parameters
        ----------
        drives : dict
            Serial numbers of NVMe drives of 64 MiB, each with additional options of QEMU's ``nvme``.
        append : str
            Additions to the kernel's command line.
        """
        arguments = ["-device", "pcie-root-port,id=upstream,addr=9", "-device", "nvme-subsys,id=subsystem"]
        for serial, options in drives.items():
            image = self.folder / f"{serial}.raw"
            image.write_bytes(b"")
            os.truncate(image, 64 << 20)
            arguments += [
                "-drive",
                f"file={image},format=raw,if=none,id=image-{serial}",
                "-device",
                f"nvme,id={serial},serial={serial},{options}",
                "-device",
                f"nvme-ns,drive=image-{serial},bus={serial},nsid=1,shared=off",
            ]
        command = [
            QEMU, "-accel", "tcg,thread=multi", "-smp", "2", "-machine", "q35", "-cpu", "Nehalem", "-m", "1G",
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
            "-device", "intel-iommu,intremap=on,aw-bits=39",  # client processors have this width
            "-kernel", str(self.kernel), "-initrd", str(self.initramfs),
            "-append", f"{KERNEL_OPTIONS} {append}",
            *arguments,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the guest took over {SECONDS} s:\n{(error.stdout or b'').decode()}") from error
        output = done.stdout.decode(errors="replace").replace("\r\n", "\n")
        if done.returncode:
            raise RuntimeError(f"QEMU ended with {done.returncode}:\n{done.stderr.decode(errors='replace')}\n{output}")
        return output

    def _files(self) -> Iterator[tuple[str, int, bytes, int]]:
        """Yield name, mode, content and time of the files of the initramfs."""
        executable = Path(os.path.realpath(sys.executable))
        modules = sorted(set(self._imported()))
        natives = [path for path in modules if ".so" in path.name]
        busybox = self.unpacked / "bin" / "busybox"
        yield "bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes(), 0
        for link in ("sh", "mount", "umount", "mke2fs", "mkswap", "swapon", "swapoff", "dd"):
            yield f"bin/{link}", stat.S_IFLNK | 0o777, b"busybox", 0
        insert = []
        for path in _kernel_modules(self.unpacked, MODULES):
            yield f"mod/{path.name}", stat.S_IFREG | 0o644, path.read_bytes(), 0
            insert.append(f"$B insmod /mod/{path.name}")
        for path in [executable, self.program, *modules, *_libraries([executable, *natives])]:
            mode = 0o755 if os.access(path, os.X_OK) else 0o644
            yield str(path).lstrip("/"), stat.S_IFREG | mode, path.read_bytes(), int(path.stat().st_mtime)
        for path in modules:
            if path.suffix == ".py" and (cached := Path(importlib.util.cache_from_source(str(path)))).exists():
                yield str(cached).lstrip("/"), stat.S_IFREG | 0o644, cached.read_bytes(), 0
        text = INIT.format(insert="\n".join(insert), path=":".join(_paths()), python=executable, program=self.program)
        yield "init", stat.S_IFREG | 0o755, text.encode(), 0

    def _imported(self) -> Iterator[Path]:
        """Yield the files of all modules that the program imports, found by a separate Python process."""
        probe = (
            "import runpy, sys\n"
            f"runpy.run_path({str(self.program)!r}, run_name='probe')\n"
            "for m in list(sys.modules.values()):\n"
            "    if getattr(m, '__file__', None): print(m.__file__)\n"
        )
        done = subprocess.run(
            [os.path.realpath(sys.executable), "-S", "-c", probe],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": ":".join(_paths())},
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        yield from map(Path, done.stdout.split("\n")[:-1])
        codecs = importlib.util.find_spec("encodings")
        assert codecs is not None and codecs.submodule_search_locations
        for name in ("__init__", "aliases", "utf_8", "ascii", "latin_1"):
            yield Path(codecs.submodule_search_locations[0]) / f"{name}.py"


INIT = """#!/bin/sh
B=/bin/busybox
$B mount -t devtmpfs dev /dev; $B mount -t proc proc /proc; $B mount -t sysfs sys /sys
{insert}
PATH=/bin PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1 {python} -S {program}
echo "the program ended with $?"
$B poweroff -f
"""


def _paths() -> list[str]:
    import warpwell

    return [str(Path(warpwell.__file__).parents[1]), sysconfig.get_path("purelib")]


def _packages(folder: Path) -> Path:
    """Fetch and unpack Debian's kernel and busybox, once; return the folder with boot, bin and lib."""
    done = folder / "unpacked"
    if done.exists():
        return done
    missing = [tool for tool in ("apt-get", "apt-cache", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise CannotRun(f"the guest needs Debian's packages {META} and busybox-static, but {missing[0]} is missing")
    folder.mkdir(parents=True, exist_ok=True)
    dependencies = subprocess.run(["apt-cache", "depends", META], capture_output=True, text=True, timeout=60).stdout
    kernel = re.search(r"Depends: (linux-image-\S+)", dependencies)
    names = [kernel[1] if kernel else META, "busybox-static"]
    try:
        got = subprocess.run(
            ["apt-get", "download", *names], cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"the packages {', '.join(names)} were not downloaded within {DOWNLOAD_SECONDS} s") from error
    if got.returncode or kernel is None:
        raise CannotRun(f"apt-get download {' '.join(names)} failed (apt-get update?): {got.stderr[-300:]}")
    parts = folder / f"unpacked.{os.getpid()}"
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(parts)], check=True, timeout=120)
        package.unlink()
    parts.rename(done)
    return done


def _kernel_modules(root: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the files of modules, each once and after its dependencies."""
    found = {path.stem.replace("-", "_"): path for path in (root / "lib/modules").rglob("*.ko")}
    visited: set[str] = set()

    def visit(name: str) -> Iterator[Path]:
        if name in found and name not in visited:  # modules without a file are built into the kernel
            visited.add(name)
            depends = re.search(rb"\0depends=([^\0]*)", found[name].read_bytes())
            for each in depends[1].decode().split(",") if depends else []:
                yield from visit(each.replace("-", "_"))
            yield found[name]

    for name in names:
        yield from visit(name.replace("-", "_"))


def _libraries(files: Sequence[Path]) -> list[Path]:
    """Return the paths of the shared libraries that programs load."""
    output = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, timeout=60).stdout
    return [Path(name) for name in sorted(set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", output, re.MULTILINE)))]


def archive(files: Iterable[tuple[str, int, bytes, int]], out: object) -> None:
    """Write an initramfs ("newc", see initramfs-buffer-format in Linux's documentation)."""
    write = out.write  # type: ignore[attr-defined]
    folders: set[str] = set()
    number = 0

    def add(name: str, mode: int, content: bytes = b"", when: int = 0, device: tuple[int, int] = (0, 0)) -> None:
        nonlocal number
        number += 1
        path = name.encode() + b"\0"
        head = (number, mode, 0, 0, 1, when, len(content), 0, 0, *device, len(path), 0)
        text = b"070701" + b"".join(b"%08x" % field for field in head) + path
        write(text + b"\0" * (-len(text) % 4) + content + b"\0" * (-len(content) % 4))

    def folder(name: str) -> None:
        if name and name not in folders:
            folder(os.path.dirname(name))
            folders.add(name)
            add(name, stat.S_IFDIR | 0o755)

    for name in ("dev", "proc", "sys", "tmp", "mnt"):
        folder(name)
    add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    written: set[str] = set()
    for name, mode, content, when in files:
        clean = os.path.normpath(name)
        if clean not in written:
            written.add(clean)
            folder(os.path.dirname(clean))
            add(clean, mode, content, when)
    add("TRAILER!!!", 0)
