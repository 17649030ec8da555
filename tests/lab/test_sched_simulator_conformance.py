"""The simulator does what every executor does."""

from lab.sched.rates import ClassTable
from lab.sched.simulator import HostDelays, Simulator
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Kind, Task
from warpwell.testing.executors import ExecutorConformance


class Simulated(ExecutorConformance):
    VIRTUAL = True
    BLOCKS = 40_000

    def task(self, executor, *, rounds=None):
        profile = Profile(kind=Kind.COMPUTE, seconds=1e-6 if rounds == 0 else 0.05, resident=8 * 132)
        return Task("simulated", self.BLOCKS, profile)

    def counts(self, task):
        return None


class TestSwitch(Simulated):
    def make(self):
        return Simulator(ClassTable(), mode="switch")


class TestDrain(Simulated):
    def make(self):
        return Simulator(ClassTable(), mode="drain", seed=3)


class TestBusyHost(Simulated):
    def make(self):
        return Simulator(ClassTable(), mode="drain", seed=3, host=HostDelays(2e-4, 5e-5, 1e-5, 2e-5))
