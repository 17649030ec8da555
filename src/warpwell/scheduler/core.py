"""Core: carries out what a policy decides, keeps places, memory and quotas, and writes the log."""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from .. import errors
from .admission import Admission
from .events import Log, Many
from .executor import Ended, EndedAlike, Executor, Stopped
from .policy import Hold, Launch, Policy, Preempt, Rates, Resize, View
from .series import Series
from .task import CANCELLED, DONE, PREEMPTED, RUNNING, STOPPING, Job, Placement, Request, State, Task
from .tenants import Account, Tenant, Tenants
from .waiting import Waiting

if TYPE_CHECKING:
    from .predict.learner import Learner

WHOLE = Placement()

LEARN, RELEARN = 0.2, 0.05
"""Weight of a new measurement of what a decision takes, where it is sooner, and later: others may disturb it."""

SLOWEST = 0.5e-3
"""Seconds that one is taken for at most: what takes longer, such as compiling, happens once."""


class Core:
    """A scheduler without a clock, threads or random numbers: time comes from the executor.

    ``step`` is called when something was submitted, when the executor has something to say, and at the time that the
    last step returned. Equal requests on an equal executor give an equal log.

    A task that fails or is cancelled frees its place and memory and ends its request: later tasks of it are
    cancelled. All other tasks go on.

    Parameters
    ----------
    executor : Executor
    policy : Policy or str
        Or a name that `warpwell.scheduler.policies.policy` knows.
    limit : int
        Kernels that may run at the same time.
    rates : Rates, optional
        Estimates of how fast kernels run together. By default the class table of `warpwell.scheduler.predict.rates`.
    tenants : mapping or iterable, optional
        Settings of tenants; see `Tenants`.
    log : Log, optional
        What to write to.
    patience : int
        How many tasks may be admitted past one that does not fit the memory, before memory is kept free for it.
    keep : bool
        Whether `jobs` keeps those that have ended.
    trusts : bool
        Whether times that submitters gave are true (`View.trusts`).
    learner : Learner, optional
        Who is told what kernels took that had the whole device to themselves.

    Attributes
    ----------
    running : list of Job
        In the order of residency.
    log : Log
    tenants : Tenants
    admission : Admission
        Which tasks may have memory now.
    ended : list of Job or None
        Those that have ended since the list was last emptied; None (by default) where nobody empties it.
    """

    def __init__(
        self,
        executor: Executor,
        policy: Policy | str,
        *,
        limit: int = 2,
        rates: Rates | None = None,
        tenants: Mapping[str, Any] | Iterable[Tenant] | None = None,
        log: Log | None = None,
        patience: int = 64,
        keep: bool = True,
        learner: Learner | None = None,
        trusts: bool = True,
    ) -> None:
        limit = errors.checked_integer(limit, "limit")
        if isinstance(policy, str):
            from .policies import policy as named

            policy = named(policy)
        if rates is None:
            from .predict.rates import ClassTable

            rates = ClassTable(executor.capacity)
        self.executor = executor
        self.policy = policy
        self.limit = limit
        self.log = Log() if log is None else log
        self.tenants = Tenants(executor.capacity, tenants)
        self.running: list[Job] = []
        self.admission = Admission(executor.capacity.memory, self.tenants, patience)
        self.ended: list[Job] | None = None
        self._keep = keep
        self._learner = learner
        self._jobs: dict[int, Job] = {}
        self._number = 0
        self._arrivals: list[tuple[float, int, Job]] = []
        self._next: dict[Job, Job] = {}
        self._cancelling: set[Job] = set()
        self._held: tuple[int, ...] = ()
        self._launches = self._trained = 0
        self._look_again: float | None = None
        self._trains: dict[Job, deque[Job]] = {}
        self._behind: dict[Job, deque[Job]] = {}
        self._given: set[Job] = set()
        self._relieves: dict[Job, Job] = {}
        self._failed: deque[Ended | Stopped] = deque()
        self._changed = True
        self._enough = 0
        self._latest: float | None = None
        self._queue = Waiting(policy.bucket, policy.key, self.admission.allowed)
        self._view = View(
            executor.now(), self.running, self._queue, limit, rates, executor.cost, executor.capacity,
            self.tenants, trains=self._trains, trusts=trusts,
        )  # fmt: skip

    @property
    def free_memory(self) -> int:
        """Bytes that admitted tasks and arrays that stay on the device leave."""
        return self.admission.free

    @property
    def waiting(self) -> list[Job]:
        """Jobs that wait to be launched, or launched again, in order of arrival."""
        return self._queue.everything

    @property
    def first_waiting(self) -> Job | None:
        """The oldest job that could be launched now, as far as quotas and memory go."""
        return self._queue.first()

    @property
    def jobs(self) -> list[Job]:
        """All jobs in order of submission; without `keep`, those that have not ended."""
        return list(self._jobs.values())

    @property
    def busy(self) -> bool:
        """Whether something runs, waits or is still to arrive."""
        return bool(self.running or self._queue.count or self._arrivals)

    def welcomes(self, request: Request) -> bool:
        """Whether `submit` is sure to take a request in. Any thread may ask: this looks at nothing that changes."""
        memory = self.executor.capacity.memory
        return not self.tenants.named and all([task.memory - task.there <= memory for task in request.tasks])

    def submit(self, request: Request) -> list[Job]:
        """Take a request in. Its first task arrives at ``request.arrival``, each other one when that before it ends.

        Returns
        -------
        list of Job
            One a task.

        Raises
        ------
        TaskMemoryError
            A task is larger than the device's memory or than its tenant's quota. Nothing of the request is taken in.
        QuotaError
            There are settings of tenants, and none names this one.
        """
        accounts = [self.tenants.account(task.tenant) for task in request.tasks]
        for task, account in zip(request.tasks, accounts, strict=True):
            if not task.memory:
                continue
            needs, memory = task.memory - task.there, self.executor.capacity.memory
            bounds = ((needs, memory, "the device has"), (task.memory, account.memory, "its tenant may hold"))
            for its, bytes_, whose in bounds:
                if bytes_ is not None and its > bytes_:
                    why = {"rule": "memory", "bytes": its, "most": bytes_}
                    self.log.note([(self.executor.now(), "reject", self._number, task.name, task.tenant, why)])
                    raise errors.TaskMemoryError(
                        f"task {task.name!r} needs {its} bytes and {whose} {bytes_}: make it smaller, or split it",
                        task=task.name,
                    )
        jobs: list[Job] = []
        first = self._number if request.first is None else request.first
        for number, task in enumerate(request.tasks, first):
            priority = accounts[number - first].priority(task)
            job = Job(task, request, request.arrival, number=number, priority=priority)
            task.number = number
            self._counts_memory(task)
            self._jobs[number] = job
            if jobs:
                self._next[jobs[-1]] = job
            jobs.append(job)
        self._number = max(self._number, first + len(jobs))
        heapq.heappush(self._arrivals, (request.arrival, jobs[0].number, jobs[0]))
        return jobs

    def submit_alike(self, series: Series) -> None:
        """Take in a series of tasks, each a request of its own that arrives now.

        `welcomes` said of one of them that it is to be taken in.
        """
        now, first, task = self.executor.now(), self._number, series.task
        if self._arrivals and self._arrivals[0][0] <= now:
            self._arrive_until(now)
        account = self.tenants.account(task.tenant)
        priority = account.priority(task)
        self._counts_memory(task)
        if task.known is not None:
            task.profile = task.known.profile  # what was measured since it was submitted
        alike = Job.alike
        numbers = range(first, first + len(series.handles))
        jobs = [alike(series, now, number, priority) for number in numbers]
        self._number = numbers.stop
        series.taken_in(first, jobs)
        self._jobs.update(zip(numbers, jobs, strict=True))
        if task.pattern is None or task.pattern.forms is None:
            for job in jobs:
                self.executor.prepare(job)
        self.tenants.wants(account)
        account.waiting += len(jobs) - 1
        self._changed |= self._queue.add_alike(jobs)
        if "arrive" in self.log.kinds:
            self.log.note_many(Many("arrive", task.name, task.tenant, numbers, now, self._submitted(jobs[0])))

    def _counts_memory(self, task: Task) -> None:
        if task.memory > task.there or (task.memory and self.tenants.named):
            self.admission.counts = True
            self._queue.unrestricted = False

    def step(self) -> float | None:
        """Poll the executor and let the policy decide, until it decides nothing more.

        Returns
        -------
        float or None
            The time at which to call again although nothing happened; None: at the next event.
        """
        executor, arrivals = self.executor, self._arrivals
        events = executor.poll()
        for event in events:
            if isinstance(event, EndedAlike):
                self._goes_on(event, events)
                continue
            if arrivals and arrivals[0][0] <= event.time:
                self._arrive_until(event.time)
            self._happened(event, events)
        while self._failed:
            self._happened(self._failed.popleft(), events)
        now = executor.now()
        if arrivals and arrivals[0][0] <= now:
            self._arrive_until(now)
        self.tenants.charge(self.running, now)
        if (self._queue.count or (self.running and self.policy.adjusts)) and self._may_decide_more(now):
            self._decide(now)
        until = arrivals[0][0] if arrivals else None
        if self._queue.count:
            if self.policy.period is not None:
                until = now + self.policy.period if until is None else min(until, now + self.policy.period)
            if self._look_again is not None:
                until = self._look_again if until is None else min(until, self._look_again)
            if self.admission.barred:
                wake = self.tenants.wake(now)
                if wake is not None:
                    until = wake if until is None else min(until, wake)
        self._latest = until
        return until

    def _may_decide_more(self, now: float) -> bool:
        """Whether the policy may decide something that it did not last time: a train that goes on changes nothing."""
        if len(self._behind) > self._enough and not self._changed and (self._latest is None or now < self._latest):
            return False
        self._changed = False
        return True

    def cancel(self, job: Job) -> bool:
        """End a job, and with it its request. One that runs is asked to leave, and ended when it has.

        Returns
        -------
        bool
            False if it has ended already. A job whose last block ends meanwhile is done nevertheless.
        """
        now = self.executor.now()
        if job.state in (DONE, State.FAILED, CANCELLED):
            return False
        if job.state in (RUNNING, STOPPING):
            self._cancelling.add(job)
            self._drop_rest(job, now, {"rule": "cancelled before it", "by": job.number})
            if job.state is RUNNING and self.may_leave(job):
                self._leave(job, now, "drain", {"rule": "cancelled"})
            return True
        self._changed = True
        if job in self._queue:
            self._queue.remove(job)
            self.tenants[job.task.tenant].waiting -= 1
        else:
            self._arrivals = [entry for entry in self._arrivals if entry[2] is not job]
            heapq.heapify(self._arrivals)
            before = next((j for j, n in self._next.items() if n is job), None)
            if before is not None:
                del self._next[before]
        self._finish(job, now, CANCELLED, None, {"rule": "asked"})
        return True

    def may_leave(self, job: Job) -> bool:
        """Whether a running job leaves if it is asked to: it does not run whole, or others are before it in a train."""
        return job in self._behind or not _plain(job)

    # -- what happens --------------------------------------------------------------------------------------
    def _arrive_until(self, time: float) -> None:
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] <= time:
            self._arrive(heapq.heappop(arrivals)[2])

    def _arrive(self, job: Job) -> None:
        self.executor.prepare(job)
        job.since = job.arrival
        task = job.task
        if task.known is not None:
            task.profile = task.known.profile  # what was measured since it was submitted
        self.tenants.wants(self.tenants.account(task.tenant))
        self._changed |= self._queue.add(job)
        if "arrive" in self.log.kinds:
            self.log.note([(job.arrival, "arrive", job.number, task.name, task.tenant, self._submitted(job))])

    @staticmethod
    def _submitted(job: Job) -> dict[str, Any]:
        """Return what the log says of an arrival: that its priority counts for less."""
        given = job.task.priority
        return {} if job.priority == given else {"submitted": given, "priority": job.priority}

    def _happened(self, event: Ended | Stopped, events: Sequence[Ended | Stopped]) -> None:
        job, time = event.job, event.time
        self.tenants.charge(self.running, time)
        if self.tenants.behind:
            gone = {job for e in events for job in (e.jobs if isinstance(e, EndedAlike) else (e.job,))}
            self.tenants.leaves(job, event, lambda j: j.done if j in gone else self.executor.progress(j))
        self._leaves_place(job, time, isinstance(event, Stopped))
        if len(self.running) > 1:
            self._look_for_room()
        account = self.tenants[job.task.tenant]
        account.running -= 1
        job.placement = None
        if isinstance(event, Stopped):
            job.done = event.done
            self._write(time, "stop", job, {"done": event.done})
            if job in self._cancelling:
                self._finish(job, time, CANCELLED, None, {"rule": "asked"})
                return
            job.state = PREEMPTED
            job.preemptions += 1
            self._changed = True
            self.tenants.wants(account)
            self._queue.add(job)
        elif event.error is not None:
            self._finish(job, time, State.FAILED, event.error, {"error": repr(event.error)})
        else:
            job.done = job.task.blocks
            figures: dict[str, Any] = {"ran": job.ran, "preemptions": job.preemptions}
            if event.seconds is not None and job.alone:
                figures["alone"] = event.seconds
                if self._learner is not None and self._learner.learn(job.task, event.seconds):
                    self._renew(job.task.known, time)
            self._finish(job, time, DONE, None, figures)

    def _goes_on(self, event: EndedAlike, events: Sequence[Ended | Stopped]) -> None:
        """Note ends of a train's tasks that are alike: what `_happened` would do for each of them, once for all.

        Of the last one of a train, and where one of them must be looked at by itself, `_happened` does it.
        """
        head, train = event.jobs[0], self._trains.get(event.jobs[0], ())
        count = min(len(event.jobs), len(train))
        if count:
            following = train[count - 1]
            placement = following.placement
            count -= following not in self._given or not (placement is head.placement or placement == head.placement)
        if (
            self._cancelling or self._next or self._arrivals or self._relieves or self.tenants.behind
            or head.preemptions or not count
            or not all(map(operator.is_, islice(train, len(event.jobs) - 1), islice(event.jobs, 1, None)))
        ):  # fmt: skip
            count = 0
        if count:
            self._end_alike(event.jobs[:count], event.times[:count])
        for its in event.each()[count:] if count < len(event.jobs) else ():
            if self._arrivals and self._arrivals[0][0] <= its.time:
                self._arrive_until(its.time)
            self._happened(its, events)

    def _end_alike(self, jobs: Sequence[Job], times: Sequence[float]) -> None:
        """End jobs of a train that are alike, from its running one on; the next one of it is with the executor."""
        head, task, train, count = jobs[0], jobs[0].task, self._trains[jobs[0]], len(jobs)
        behind = self._behind
        for _ in range(count):
            following = train.popleft()
            del behind[following]
        self._given.difference_update(jobs)
        self._given.remove(following)
        since, blocks, before = head.since, task.blocks, head.ran
        ran = [time - begun for begun, time in zip((since, *times), times, strict=False)]
        started = since if head.started is None else head.started
        for job, time, took in zip(jobs, times, ran, strict=True):
            job.started, job.ran, job.since, job.ended = since, took, time, time
            job.state, job.done, job.placement = DONE, blocks, None
            since = time
        head.started, head.ran, ran[0] = started, before + ran[0], before + ran[0]
        following.since = since
        if following.started is None:
            following.started = since
        self.tenants.charge(self.running, since)
        self.tenants[task.tenant].running -= count
        self.running[self.running.index(head)] = following
        del self._trains[head]
        if train:
            self._trains[following] = train
        if task.memory:
            self.admission.gone_alike(jobs)
        if not self._keep:
            for its in jobs:
                del self._jobs[its.number]
        if len(self.running) > 1:
            self._look_for_room()
        if "end" in self.log.kinds:
            numbers = [its.number for its in jobs]
            self.log.note_many(Many("end", task.name, task.tenant, numbers, times, {"preemptions": 0}, "ran", ran))
        self.policy.ended(head, times[0])
        if self.ended is not None:
            self.ended += jobs

    def _leaves_place(self, job: Job, time: float, stopped: bool) -> None:
        """Take a job out of its place, which the next of its train takes, or out of its train."""
        behind = self._behind.pop(job, None)
        if behind is not None:
            behind.remove(job)
            self._given.discard(job)
            self._relieves.pop(job, None)
            if not behind:
                self._trains = {head: train for head, train in self._trains.items() if train}
                self._view.trains = self._trains
            job.since = time
            if job.started is None and not stopped:
                job.started = time  # it began beside one that was leaving
            return
        job.ran += time - job.since
        job.since = time
        place = self.running.index(job)
        train = self._trains.pop(job, None)
        if train is None:
            del self.running[place]
            self._changed = True
            return
        following = train.popleft()
        del self._behind[following]
        if _plain(job) and _plain(following):
            self.running[place] = following
        else:
            del self.running[place]
            self.running.append(following)  # its workers are the youngest
            self._changed = True
        relieved = self._relieves.pop(following, None)
        if relieved in self.running:
            self.running.remove(relieved)
            self.running.append(relieved)
        following.since = time
        if following.started is None:
            following.started = time
        if train:
            self._trains[following] = train
        if following in self._given:
            self._given.remove(following)
        else:
            self._begin_next(following, train)

    def _begin_next(self, job: Job, train: deque[Job]) -> None:
        """Launch a job that waited in the scheduler for its place in a train, and give the device those behind it."""
        assert job.placement is not None
        try:
            self.executor.launch(job, job.placement)
        except Exception as error:  # as a launch that fails; the next step hears of it
            self._failed.append(Ended(job, job.since, error))
            return
        last = job
        for following in train:
            try:
                if not self._give_behind(following, last):
                    break
            except Exception:  # it comes out of its launch, when its turn comes
                break
            last = following

    def _give_behind(self, job: Job, last: Job) -> bool:
        assert job.placement is not None
        given = self.executor.launch_behind(job, job.placement, last)
        if given:
            self._given.add(job)
        return given

    def _renew(self, known: Any, now: float) -> None:
        """Give waiting jobs of the same code and size the profile that was just measured."""
        self._changed = True
        for job in self._queue.all_of(known):
            self._queue.remove(job)
            self.policy.ended(job, now)
            job.task.profile = known.profile
            self._queue.add(job)

    def _finish(self, job: Job, time: float, state: State, error: BaseException | None, why: dict[str, Any]) -> None:
        """End a job that is in no list any more; go on with its request, or end that too."""
        job.state = state
        job.since = job.ended = time
        job.error = error
        task = job.task
        if task.memory:
            self.admission.gone(job)
        if self._cancelling:
            self._cancelling.discard(job)
        if not self._keep:
            del self._jobs[job.number]
        if self.ended is not None:
            self.ended.append(job)
        if state is CANCELLED:
            self.executor.discard(job)
        if state is DONE:
            self._write(time, "end", job, why)
            self.policy.ended(job, time)
            following = self._next.pop(job, None)
            if following is not None:
                following.arrival = time
                self._arrive(following)
            return
        if state is CANCELLED:
            kind = "cancel"
        else:
            kind = "lost" if isinstance(error, errors.TaskLostError) else "fail"
        self._write(time, kind, job, why)
        self.policy.ended(job, time)
        self._drop_rest(job, time, {"rule": f"{state.value} before it", "by": job.number})

    def _drop_rest(self, job: Job, time: float, why: dict[str, Any]) -> None:
        following = self._next.pop(job, None)
        while following is not None:
            following.state = CANCELLED
            following.since = following.ended = time
            if not self._keep:
                del self._jobs[following.number]
            if self.ended is not None:
                self.ended.append(following)
            self._write(time, "cancel", following, why)
            following = self._next.pop(following, None)

    # -- what is decided -----------------------------------------------------------------------------------
    def _decide(self, now: float) -> None:
        view, policy, admission, executor = self._view, self.policy, self.admission, self.executor
        view.now = now
        before, trained = self._launches, self._trained
        if self._learner is not None:
            view.pairs = self._learner.history.pairs
        if policy.watches:
            for job in self.running:
                job.done = executor.progress(job)
        again, spare = True, False
        self._look_again = None
        while again:
            admission.barred = self.tenants.barred(spare)
            self._queue.unrestricted = not (admission.barred or admission.counts)
            again = False
            for decision in policy.decide(view):
                if isinstance(decision, Launch):
                    again |= self._launch(decision, now)
                    if decision.others:
                        self._launch_others(decision, now)
                elif isinstance(decision, Preempt):
                    self._preempt(decision, now)
                elif isinstance(decision, Resize):
                    self._resize(decision, now)
                else:
                    self._hold(decision, now)
            if not self._queue.count:
                break
            if not again and not spare and admission.barred and len(self.running) < self.limit:
                # Tenants that may burst get places that no tenant within its quota takes.
                again = spare = True
        self._enough = len(self._behind) // 2
        if self._launches != before:
            if self._trained == trained:
                took = min(executor.now() - now, SLOWEST)
                view.overhead += (LEARN if took < view.overhead else RELEARN) * (took - view.overhead)
            if len(self.running) > 1 or self.tenants.behind:
                self._look_for_room()

    def _look_for_room(self) -> None:
        """See which kernels were launched behind others: their tenants are not charged before they have room."""
        running = self.running
        behind: dict[Job, Job] = {}
        if len(running) > 1 and len(self.tenants) > 1:
            rates = self._view.rates.together(running, [job.placement or WHOLE for job in running])
            most = max(rates)
            if min(rates) < 0.1 * most:
                first = running[rates.index(most)]
                behind = {j: first for j, rate in zip(running, rates, strict=True) if rate < 0.1 * most}
        if behind or self.tenants.behind:
            self.tenants.wait_behind(behind)

    def _launch(self, decision: Launch, now: float) -> bool:
        job, placement = decision.job, decision.placement
        if job not in self._queue:
            raise self._wrong(f"launched {job.task.name!r}, which is {job.state.value}")
        if decision.behind is not None or (placement.plain and len(self.running) >= self.limit):
            return self._launch_behind(decision, now)
        if len(self.running) >= self.limit:
            raise self._wrong(f"launched {job.task.name!r} where {self.limit} run already")
        if not (self._queue.unrestricted or self.admission.allowed(job)):
            return False
        task = job.task
        account = self._leaves_queue(job)
        placement, why = _placed(decision)
        job.placement = placement
        try:
            self.executor.launch(job, placement)
        except Exception as error:  # a launch that fails is the task's failure, not the scheduler's
            job.placement = None
            self._finish(job, now, State.FAILED, error, {"error": repr(error)})
            return True
        job.state = RUNNING
        job.since = now
        if job.started is None:
            job.started = now
        account.running += 1
        if task.known is not None:
            job.alone = placement.workers is None and not self.running and not job.preemptions
        for other in self.running:
            other.alone = False
        self._launches += 1
        self.running.append(job)
        self._write(now, "launch", job, why)
        return True

    def _leaves_queue(self, job: Job) -> Account:
        """Take a waiting job out of its queue and give it its memory; return the account of its tenant."""
        task = job.task
        self._queue.launched(job)
        account = self.tenants[task.tenant]
        account.waiting -= 1
        if task.memory:
            self.admission.admit(job)
        return account

    def _launch_behind(self, decision: Launch, now: float) -> bool:
        """Put a job into a train, the shortest by default; where the executor cannot, it is launched at its turn."""
        job, trains, head = decision.job, self._trains, decision.behind
        if head is not None:
            if head not in self.running:
                raise self._wrong(f"launched {job.task.name!r} behind {head.task.name!r}, which is {head.state.value}")
        else:
            shortest = 0
            for its in self.running:
                if _plain(its):
                    length = len(trains[its]) if its in trains else 0
                    if head is None or length < shortest:
                        head, shortest = its, length
        if head is None or (decision.behind is None and len(self._behind) >= self.policy.ahead):
            raise self._wrong(f"launched {job.task.name!r} where {len(self.running)} run already")
        if not (self._queue.unrestricted or self.admission.allowed(job)):
            return False
        account = self._leaves_queue(job)
        train = trains.get(head)
        if train is None:
            train = trains[head] = deque()
        last = next((its for its in reversed(train) if its.state is RUNNING), head)
        placement, why = _placed(decision)
        job.placement = placement
        job.alone = False
        try:
            if last is head or last in self._given:
                self._give_behind(job, last)
        except Exception as error:  # a launch that fails is the task's failure, not the scheduler's
            job.placement = None
            if not train:
                del trains[head]
            self._finish(job, now, State.FAILED, error, {"error": repr(error)})
            return True
        train.append(job)
        self._behind[job] = train
        if placement.plain:
            self._trained += 1
        else:
            self._launches += 1
        relieved = decision.relieves
        if relieved is not None and job in self._given:
            relieves, failed = _ask(self.executor.relieve_when, relieved, job)
            if relieves:
                self._relieves[job] = relieved
                why = {**why, "relieves": relieved.number}
            why = {**why, **failed}
        job.state = RUNNING
        job.since = now
        account.running += 1
        if "launch" in self.log.kinds:
            self._write(now, "launch", job, {**why, "behind": last.number})
        return True

    def _launch_others(self, decision: Launch, now: float) -> None:
        """Put jobs that are alike into trains, the shortest first."""
        jobs, placement, trains, behind = decision.others, decision.placement, self._trains, self._behind
        heads = [job for job in self.running if _plain(job)]
        if not heads:
            return  # the first one failed
        if not placement.plain or len(self._behind) + len(jobs) > self.policy.ahead:
            raise self._wrong(f"launched {len(jobs)} of {jobs[0].task.name!r} where {len(self.running)} run already")
        account = self.tenants[jobs[0].task.tenant]
        self._queue.launched_alike(jobs)
        account.waiting -= len(jobs)
        account.running += len(jobs)
        if jobs[0].task.memory:
            self.admission.admit_alike(jobs)
        self._trained += len(jobs)
        parts = _dealt(jobs, [len(trains.get(head, ())) for head in heads])
        told = "launch" in self.log.kinds
        for head, part in zip(heads, parts, strict=True):
            if not part:
                continue
            train = trains.get(head)
            if train is None:
                train = trains[head] = deque()
            last = train[-1] if train else head
            if last is head or last in self._given:
                try:
                    count = self.executor.launch_train(part, placement, last)
                except Exception:  # it comes out of the launch of each, when its turn comes
                    count = 0
                self._given.update(part[:count])
            train += part
            for job in part:
                behind[job] = train
                job.placement, job.state, job.since = placement, RUNNING, now  # none of them was alone
            if told:
                name, tenant, why = part[0].task.name, account.name, {**decision.why, "plain": True}
                numbers = [job.number for job in part]
                before = [last.number, *numbers]
                self.log.note_many(Many("launch", name, tenant, numbers, now, why, "behind", before))

    def _preempt(self, decision: Preempt, now: float) -> None:
        job = decision.job
        if job.state is not RUNNING:
            raise self._wrong(f"preempted {job.task.name!r}, which is {job.state.value}")
        if not self.may_leave(job):
            raise self._wrong(f"preempted {job.task.name!r}, which was launched plain")
        newcomer = decision.newcomer
        for following in [*self._trains.get(job, ())][::-1]:
            if following.state is RUNNING:  # it must not begin in its place
                self._leave(following, now, "drain", {**decision.why, "ahead": True})
        self._leave(job, now, decision.mode, {**decision.why, "for": None if newcomer is None else newcomer.number})

    def _leave(self, job: Job, now: float, mode: str, why: dict[str, Any]) -> None:
        job.state = STOPPING
        behind = job in self._behind
        if not behind:
            job.ran += now - job.since
        job.since = now
        here = behind and job not in self._given
        failed = {} if here else _ask(self.executor.preempt, job, mode)[1]
        self._write(now, "preempt", job, {**why, "mode": mode, "saved": self._saved(job), **failed})
        if here:
            self._happened(Stopped(job, now, job.done), ())

    def _saved(self, job: Job) -> dict[str, float]:
        """Return the inputs of the source's cost formula, for ``warpwell sched fit``: bytes of one multiprocessor."""
        task, placement = job.task, job.placement
        blocks = min(task.profile.resident, task.blocks)
        if placement is not None and placement.workers is not None:
            blocks = min(blocks, placement.workers)
        each = -(-blocks // self.executor.capacity.processors)
        misses = [other.task.profile.miss_rate for other in self.running if other is not job]
        return {"bytes": (task.profile.registers + task.profile.shared) * each, "miss_rate": max(misses, default=0.0)}

    def _resize(self, decision: Resize, now: float) -> None:
        job, placement = decision.job, decision.job.placement
        if placement is None or job.state is not RUNNING or placement.plain:
            return
        workers, younger = decision.workers, decision.younger
        if placement.workers == workers and not younger:
            return
        if job in self._behind:
            raise self._wrong(f"resized {job.task.name!r}, whose turn has not come")
        job.alone = False
        job.placement = replace(placement, workers=workers)
        self._launches += 1
        why = {**decision.why, "workers": workers}
        if younger:
            self.running.remove(job)
            self.running.append(job)
            why["younger"] = True
        self._write(now, "resize", job, {**why, **_ask(self.executor.resize, job, workers, younger)[1]})

    def _hold(self, decision: Hold, now: float) -> None:
        """Log a preemption that was weighed and not done, once for the same newcomer beside the same kernels."""
        if decision.again is not None:
            self._look_again = now + decision.again
        key = (decision.job.number, *(job.number for job in self.running))
        if key != self._held:
            self._held = key
            self._write(now, "hold", decision.job, decision.why)

    # -- the log -------------------------------------------------------------------------------------------
    def _write(self, time: float, kind: str, job: Job, why: dict[str, Any]) -> None:
        if kind in self.log.kinds:
            self.log.note([(time, kind, job.number, job.task.name, job.task.tenant, why)])

    def _wrong(self, what: str) -> errors.SchedulerError:
        return errors.SchedulerError(f"policy {self.policy.name!r} {what}: correct the policy")


def _ask(request: Callable[..., Any], *about: Any) -> tuple[Any, dict[str, str]]:
    """Ask an executor to change what runs; return its answer, and what the log says if it raised (see `Executor`)."""
    try:
        return request(*about), {}
    except errors.TaskLostError:
        raise
    except Exception as error:  # the job runs on, and the others do
        return None, {"error": repr(error)}


def _plain(job: Job) -> bool:
    return job.placement is not None and job.placement.plain


def _placed(decision: Launch) -> tuple[Placement, dict[str, Any]]:
    """Return how a job is launched, and what the log says of it: what cannot be cut runs whole."""
    placement, why, task = decision.placement, decision.why, decision.job.task
    if task.whole:
        placement = replace(placement, plain=True, workers=None)
        why = {**why, "whole": task.whole}
    if placement.plain:
        why = {**why, "plain": True}
    elif placement.workers is not None:
        why = {**why, "workers": placement.workers}
    return placement, why


def _dealt(jobs: Sequence[Job], lengths: list[int]) -> list[list[Job]]:
    """Return what of `jobs` goes into trains of these lengths, one after the other into the shortest."""
    parts: list[list[Job]] = [[] for _ in lengths]
    for k, job in enumerate(jobs):
        least = min(lengths)
        if max(lengths) == least:
            for n, part in enumerate(parts):
                part += jobs[k + n :: len(parts)]
            break
        shortest = lengths.index(least)
        parts[shortest].append(job)
        lengths[shortest] += 1
    return parts
