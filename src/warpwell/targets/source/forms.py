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
            self.prepare_plain()
            forms = {"plain": self._functions["plain"]}
            resources = {"plain": self._resources["plain"]}
            if blocks.preemptible:
                warps = -(-blocks.threads // 32)
                registers = registers_for(resources["plain"]["registers"], 32 * max(2, warps))
                forms["workers"], resources["workers"] = self._load(registers)
            cache[self._key] = forms, resources
        self._set(*cache[self._key])

    def prepare_plain(self) -> None:
        """Compile and load the kernel alone."""
        function, resources = self._load(None)
        self._set({"plain": function}, {"plain": resources})

    def _set(self, functions: dict[str, Any], resources: dict[str, dict[str, int]]) -> None:
        self._functions, self._resources = functions, resources
        self._prepared = {form: self._prepare(form, function) for form, function in functions.items()}

    def _prepare(self, form: str, function: Any) -> Prepared:
        plain = form == "plain"
        return Prepared(
            self._driver,
            function,
            self._source.name,
            0 if plain else 7,
            self._blocks.values,
            shared=self._shared,
            cooperative=plain and self._source.cooperative,
        )

    def _load(self, registers: int | None) -> tuple[Any, dict[str, int]]:
        """Return the function of the kernel alone, or with a number of registers of its workers; and its resources."""
        key = ("cuda", self._architecture, registers)
        cache = self._source.compiled
        if key not in cache:
            built = build(self._source, self._architecture, registers)
            library = self._check(self._driver.cuLibraryLoadData(built.cubin, [], [], 0, [], [], 0))
            cache[key] = self._check(self._driver.cuLibraryGetKernel(library, built.symbol.encode()))
        return self._measured(cache[key])

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

    def _check(self, result: Any) -> Any:
        return check_kernel(result, self._source.name)
