"""SourceForms: workers of a CUDA C++ kernel on a GPU."""

from __future__ import annotations

from typing import Any

from ... import errors
from ..gpu.device import check_kernel, current
from ..gpu.prepared import Prepared, PreparedForms
from .program import build


class SourceForms(PreparedForms):
    """The compiled forms of a `SourceBlocks` on the current GPU, as `blocks.cuda.Forms` are of a `BlockLaunch`."""

    def __init__(self, blocks: Any) -> None:
        self._driver, device = current()
        self._blocks = blocks
        self._source = blocks.kernel
        self._ordinal = int(device.device_id)
        self._processors = int(device.properties.multiprocessor_count)
        self._architecture = f"sm_{device.arch}"
        launch = blocks.launch
        self._grid = self._worker_arguments = (*launch.shape, 1, 1)[:3]
        self._plain_arguments = ()
        self._threads = (*launch.threads, 1, 1)[:3]
        self._shared = int(launch.shared)
        self._blocks_count = blocks.blocks
        self._key = ("cuda-forms", self._ordinal, blocks.threads, self._shared)

    def prepare(self) -> None:
        """Compile and load all forms, so that no launch waits for the compiler."""
        from ..blocks.cuda import registers_for

        cache, blocks = self._source.compiled, self._blocks
        if self._key not in cache:
            forms = {"plain": self._load(None)}
            if blocks.preemptible:
                warps = -(-blocks.threads // 32)
                forms["workers"] = self._load(registers_for(forms["plain"][1]["registers"], 32 * max(2, warps)))
            cache[self._key] = forms
        self._set(cache[self._key])

    def prepare_plain(self) -> None:
        """Compile and load the kernel alone."""
        self._set({"plain": self._load(None)})

    def _set(self, forms: dict[str, tuple[Any, dict[str, int]]]) -> None:
        """Set the functions and resources of the forms."""
        self._resources = {form: resources for form, (_, resources) in forms.items()}
        self._prepared = {
            form: Prepared(
                self._driver,
                function,
                self._source.name,
                0 if form == "plain" else 7,
                self._blocks.values,
                shared=self._shared,
                cooperative=form == "plain" and self._source.cooperative,
            )
            for form, (function, _) in forms.items()
        }

    def _load(self, registers: int | None) -> tuple[Any, dict[str, int]]:
        """Return the function of the kernel alone, or with a number of registers of its workers; and its resources."""
        key = ("cuda", self._architecture, registers)
        cache = self._source.compiled
        if key not in cache:
            built = build(self._source, self._architecture, registers)
            library = self._check(self._driver.cuLibraryLoadData(built.cubin, [], [], 0, [], [], 0))
            cache[key] = self._check(self._driver.cuLibraryGetKernel(library, built.symbol.encode()))
        kernel, driver, threads = cache[key], self._driver, self._blocks.threads
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

    def _check(self, result: Any) -> Any:
        return check_kernel(result, self._source.name)
