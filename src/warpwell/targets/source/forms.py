"""SourceForms: workers of a CUDA C++ kernel on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ..gpu.device import current
from ..gpu.prepared import Prepared, check_kernel
from .program import build


class SourceForms:
    """The compiled forms of a `SourceBlocks` on the current GPU, as `blocks.cuda.Forms` are of a `BlockLaunch`."""

    def __init__(self, blocks: Any) -> None:
        self._driver, device = current()
        self._blocks = blocks
        self._source = blocks.kernel
        self._ordinal = int(device.device_id)
        self._processors = int(device.properties.multiprocessor_count)
        self._architecture = f"sm_{device.arch}"
        launch = blocks.launch
        self._grid = (*launch.shape, 1, 1)[:3]
        self._threads = (*launch.threads, 1, 1)[:3]
        self._shared = int(launch.shared)
        self._key = ("cuda-forms", self._ordinal, blocks.threads, self._shared)
        self._forms: dict[str, tuple[Any, dict[str, int]]] = {}
        self._prepared: dict[str, Prepared] = {}

    def prepare(self) -> None:
        """Compile and load all forms, so that no launch waits for the compiler."""
        from ..blocks.cuda import registers_for

        made, blocks = self._source.compiled, self._blocks
        if self._key not in made:
            self.prepare_plain()
            found = dict(self._forms)
            if blocks.preemptible:
                warps = -(-blocks.threads // 32)
                used = found["plain"][1]["registers"]
                kernels = self._kernels(registers_for(used, 32 * max(2, warps)))
                found["workers"] = self._measured(kernels["workers"])
            made[self._key] = found
        self._forms = made[self._key]

    def prepare_plain(self) -> None:
        """Compile and load the kernel alone."""
        self._forms = {"plain": self._measured(self._kernels(None)["plain"])}

    @property
    def compiled(self) -> bool:
        """Whether `prepare` has nothing to compile."""
        return self._key in self._source.compiled

    def _kernels(self, registers: int | None) -> dict[str, Any]:
        key = ("cuda", self._architecture, registers)
        made = self._source.compiled
        if key not in made:
            built = build(self._source, self._architecture, registers)
            library = self._check(self._driver.cuLibraryLoadData(built["cubin"], [], [], 0, [], [], 0))
            made[key] = {
                form: self._check(self._driver.cuLibraryGetKernel(library, name.encode()))
                for form, name in built["names"].items()
            }
        return dict(made[key])

    def _measured(self, kernel: Any) -> tuple[Any, dict[str, int]]:
        """Return the function to launch and its resources."""
        driver, threads = self._driver, self._blocks.threads
        attributes = driver.CUfunction_attribute

        def read(attribute: Any) -> int:
            return int(self._check(driver.cuKernelGetAttribute(attribute, kernel, self._ordinal)))

        if self._shared > 48 << 10:
            maximum = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(driver.cuKernelSetAttribute(maximum, self._shared, kernel, self._ordinal))
        function = driver.CUfunction(int(kernel))
        each = int(self._check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, self._shared)))
        resources = {
            "registers": read(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS),
            "shared": read(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) + self._shared,
            "local": read(attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
            "threads": threads,
            "resident": each * self._processors,
        }
        if each < 1:
            raise errors.ArgumentError(
                f"a block of CUDA kernel {self._source.name!r} does not fit on this GPU: {threads} threads of "
                f"{resources['registers']} registers, {resources['shared']} bytes of shared memory; make it smaller"
            )
        return function, resources

    def resources(self, form: str) -> dict[str, int]:
        """Return the registers per thread, shared and local bytes, threads, and resident blocks of a form."""
        return dict(self._forms[form][1])

    def start(self, control: int, base: int, workers: int, stream: Any, chunk: int = 1, rounds: int = 1) -> None:
        """Launch workers; see `blocks.cuda.Forms.start`."""
        arguments = self._control_arguments(control, base, chunk, rounds)
        self._prepare("workers", len(arguments)).launch((workers,), self._threads, stream, arguments)

    def workers_row(self, control: int, base: int, workers: int, chunk: int = 1) -> NDArray[np.int64]:
        """See `blocks.cuda.Forms.workers_row`."""
        arguments = self._control_arguments(control, base, chunk)
        return self._prepare("workers", len(arguments)).own_row((workers,), self._threads, arguments)

    def _control_arguments(self, control: int, base: int, chunk: int, rounds: int = 1) -> tuple[int, ...]:
        blocks = self._blocks.blocks
        return control, base, chunk, blocks * rounds, blocks, *self._grid

    def plain_row(self) -> NDArray[np.int64] | None:
        """See `blocks.cuda.Forms.plain_row`; None for a cooperative kernel."""
        if self._source.cooperative:
            return None
        return self._prepare("plain", 0).row(self._grid, self._threads, ())

    def start_plain(self, stream: Any) -> None:
        """Launch the kernel whole and return at once. All blocks of a cooperative kernel are resident."""
        self._prepare("plain", 0).launch(self._grid, self._threads, stream, ())

    def _prepare(self, form: str, words: int) -> Prepared:
        prepared = self._prepared.get(form)
        if prepared is None:
            prepared = self._prepared[form] = Prepared(
                self._driver,
                self._forms[form][0],
                self._source.name,
                words,
                self._blocks.values,
                shared=self._shared,
                cooperative=form == "plain" and self._source.cooperative,
            )
        return prepared

    def _check(self, result: Any) -> Any:
        return check_kernel(result, self._source.name)
