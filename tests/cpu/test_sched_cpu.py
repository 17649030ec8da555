from warpwell.scheduler.cpu_executor import CpuExecutor
from warpwell.testing.executors import ExecutorConformance


class TestCpuExecutor(ExecutorConformance):
    def make(self) -> CpuExecutor:
        return CpuExecutor(threads=3)
