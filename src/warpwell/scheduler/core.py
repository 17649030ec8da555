"""Core: carries out what a policy decides, keeps places, memory and quotas, and writes the log."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from .. import errors
from .._check import checked_integer
from .admission import Admission
from .events import Log, Many
from .executor import Ended, EndedAlike, Executor, Stopped
from .policy import Hold, Launch, Policy, Preempt, Rates, Resize, View
from .series import Series
from .task import CANCELLED, DONE, PREEMPTED, RUNNING, STOPPING, Job, Placement, Request, State, Task, Train
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
        limit = checked_integer(limit, "limit")
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
        self._trains: dict[Job, Train] = {}
        self._relieves: dict[Job, Job] = {}
        self._failed: deque[Ended | Stopped] = deque()
        self._launching: Job | None = None
        self._unwritten: list[tuple[Any, ...]] = []
        self._unsaved: list[tuple[dict[str, Any], Job, Placement | None, list[Job]]] = []
        self._changed = True
        self._enough = 0
        self._latest: float | None = None
        self._queue = Waiting(policy.bucket, policy.key, self.admission.allowed)
        self._view = View(
            executor.now(),
            self.running,
            self._queue,
            limit,
            rates,
            executor.cost,
            executor.capacity,
            self.tenants,
            trains=self._trains,
            trusts=trusts,
        )

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
                    self._unwritten.append((self.executor.now(), "reject", self._number, task.name, task.tenant, why))
                    self.write_out()
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
        priority = self.tenants.account(task.tenant).priority(task)
        self._counts_memory(task)
        alike = Job.alike
        numbers = range(first, first + len(series.handles))
        jobs = [alike(series, now, number, priority) for number in numbers]
        self._number = numbers.stop
        series.taken_in(first, jobs)
        self._jobs.update(zip(numbers, jobs, strict=True))
        self._arrive_until(now)
        self._arrive(jobs)

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
        try:
            return self._step()
        finally:
            self.write_out()

    def _step(self) -> float | None:
        executor, arrivals = self.executor, self._arrivals
        events = executor.poll()
        for event in events:
            apart = isinstance(event, EndedAlike) and not self._end_together(event.jobs)
            for its in event.each() if apart else (event,):  # type: ignore[union-attr]
                if arrivals and arrivals[0][0] <= its.time:
                    self._arrive_until(its.time)
                self._happened(its, events)
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

    @property
    def _behind(self) -> int:
        """How many jobs are in trains."""
        return sum(map(len, self._trains.values()))

    def _may_decide_more(self, now: float) -> bool:
        """Whether the policy may decide something that it did not last time: a train that goes on changes nothing."""
        same = self._trains and not self._changed and (self._latest is None or now < self._latest)
        if same and self._behind > self._enough:
            return False
        self._changed = False
        return True

    def cancel(self, job: Job) -> bool:
        """End a job, and with it its request. One that runs is asked to leave, and ended when it has.

        Returns
        -------
        bool
            False if it has ended already, or asks for it itself while it is launched. A job whose last block ends
            meanwhile is done nevertheless.
        """
        if job.state in (DONE, State.FAILED, CANCELLED) or job is self._launching:
            return False
        try:
            self._cancel(job, self.executor.now())
        finally:
            self.write_out()
        return True

    def _cancel(self, job: Job, now: float) -> None:
        if job.state in (RUNNING, STOPPING):
            self._cancelling.add(job)
            self._drop_rest(job, now, {"rule": "cancelled before it", "by": job.number})
            if job.state is RUNNING and self.may_leave(job):
                self._leave(job, now, "drain", {"rule": "cancelled"})
            return
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
        self._finish((job,), now, CANCELLED, None, {"rule": "asked"})

    def may_leave(self, job: Job) -> bool:
        """Whether a running job leaves if it is asked to: it does not run whole, or others are before it in a train."""
        return job.train is not None or not _plain(job)

    # -- what happens --------------------------------------------------------------------------------------
    def _arrive_until(self, time: float) -> None:
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] <= time:
            self._arrive((heapq.heappop(arrivals)[2],))

    def _arrive(self, jobs: Sequence[Job]) -> None:
        """Let a job wait to be launched, or several that differ in nothing but their number."""
        job, task = jobs[0], jobs[0].task
        if task.known is not None:
            task.profile = task.known.profile  # what was measured since it was submitted
        if task.pattern is None or task.pattern.forms is None:
            for its in jobs:
                self.executor.prepare(its)
        job.since = job.arrival
        self.tenants.wants(self.tenants.account(task.tenant), len(jobs))
        self._changed |= self._queue.add(jobs)
        given = task.priority  # it may count for less
        why = {} if job.priority == given else {"submitted": given, "priority": job.priority}
        self._write("arrive", jobs, job.arrival, why)

    def _end_together(self, jobs: Sequence[Job]) -> bool:
        """Whether ends of a train's jobs can be noted at once: nothing that is to be done happens between two."""
        return len(jobs) == 1 or not (
            self._next
            or self._arrivals
            or self._relieves
            or self.tenants.behind
            or jobs[0].preemptions
            or list(islice(self._trains.get(jobs[0], ()), len(jobs) - 1)) != list(jobs[1:])
        )

    def _happened(self, event: Ended | Stopped, events: Sequence[Ended | Stopped]) -> None:
        """Note what became of a job, or that it has ended, and those directly behind it (`_end_together`)."""
        job = event.job
        jobs: Sequence[Job] = (job,)
        times: Sequence[float] = (event.time,)
        if isinstance(event, EndedAlike):
            jobs, times = event.jobs, event.times
        time, stopped = times[-1], isinstance(event, Stopped)
        self.tenants.charge(self.running, time)
        if self.tenants.behind:
            gone = {job for e in events for job in (e.jobs if isinstance(e, EndedAlike) else (e.job,))}
            self.tenants.leaves(job, event, lambda j: j.done if j in gone else self.executor.progress(j))
        self._leave_place(jobs, times, stopped)
        if len(self.running) > 1:
            self._look_for_room()
        account = self.tenants[job.task.tenant]
        account.running -= len(jobs)
        if isinstance(event, Stopped):
            job.done, job.placement = event.done, None
            self._write("stop", jobs, time, {"done": event.done})
            if job in self._cancelling:
                self._finish(jobs, time, CANCELLED, None, {"rule": "asked"})
                return
            job.state = PREEMPTED
            job.preemptions += 1
            self._changed = True
            self.tenants.wants(account)
            self._queue.add(jobs)
        elif event.error is not None:
            self._finish(jobs, time, State.FAILED, event.error, {"error": repr(event.error)})
        else:
            figures: dict[str, Any] = {"ran": job.ran, "preemptions": job.preemptions}
            if event.seconds is not None and job.alone:
                figures["alone"] = event.seconds
                if self._learner is not None and self._learner.learn(job.task, event.seconds):
                    self._renew(job.task.known, time)
            self._finish(jobs, times[0], DONE, None, figures)

    def _leave_place(self, jobs: Sequence[Job], times: Sequence[float], stopped: bool) -> None:
        """Take a job out of its train, or out of its place, with those directly behind it that have ended, too.

        The next one of the train comes in its place.
        """
        job, time = jobs[0], times[-1]
        if job.train is not None:
            self._leave_train(job)
            job.since = time
            if job.started is None and not stopped:
                job.started = time  # it began beside one that was leaving
            return
        since = job.since
        for k, its in enumerate(jobs):
            if its.started is None:
                its.started = since
            end = times[k]
            its.ran += end - since
            its.since = since = end
        place = self.running.index(job)
        train = self._trains.pop(job, None)
        if train is not None and len(jobs) > 1:
            for _ in range(1, len(jobs)):
                train.popleft().train = None
            train.given -= len(jobs) - 1
        if not train:
            del self.running[place]
            self._changed = True
            return
        following = train.popleft()
        following.train = None
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
        if train.given:
            train.given -= 1
        else:
            self._begin_next(following, train)

    def _leave_train(self, job: Job) -> None:
        """Take a job out of the train that it is in."""
        train, job.train = job.train, None
        assert train is not None
        place = train.index(job)
        del train[place]
        train.given -= place < train.given
        self._relieves.pop(job, None)
        if not train:
            del self._trains[next(head for head, its in self._trains.items() if its is train)]

    def _begin_next(self, job: Job, train: Train) -> None:
        """Launch a job that waited in the scheduler for its place in a train, and give the device those behind it."""
        assert job.placement is not None
        try:
            self.executor.launch(job, job.placement)
        except Exception as error:  # as a launch that fails; the next step hears of it
            self._failed.append(Ended(job, job.since, error))
            return
        last = job
        for following in train:
            assert following.placement is not None
            try:
                if not self.executor.launch_behind(following, following.placement, last):
                    break
            except Exception:  # it comes out of its launch, when its turn comes
                break
            train.given += 1
            last = following

    def _renew(self, known: Any, now: float) -> None:
        """Give waiting jobs of the same code and size the profile that was just measured."""
        self._changed = True
        for job in self._queue.all_of(known):
            self._queue.remove(job)
            self.policy.ended(job, now)
            job.task.profile = known.profile
            self._queue.add((job,))

    def _finish(
        self, jobs: Sequence[Job], time: float, state: State, error: BaseException | None, why: dict[str, Any]
    ) -> None:
        """End a job that is in no list any more; go on with its request, or end that too. Of several all are done."""
        job, task = jobs[0], jobs[0].task
        job.since = time
        done = task.blocks if state is DONE else job.done
        for its in jobs:
            its.state, its.done, its.ended, its.placement = state, done, its.since, None
        if error is not None:
            job.error = error
        if task.memory:
            self.admission.gone(jobs)
        if self._cancelling:
            self._cancelling.difference_update(jobs)
        if not self._keep:
            for its in jobs:
                del self._jobs[its.number]
        if self.ended is not None:
            self.ended += jobs
        if state is DONE:
            ran = [its.ran for its in jobs] if len(jobs) > 1 else ()  # `why` has that of one
            self._write("end", jobs, time, why, "ran", ran)
            self.policy.ended(job, time)
            following = self._next.pop(job, None)
            if following is not None:
                following.arrival = time
                self._arrive((following,))
            return
        if state is CANCELLED:
            self.executor.discard(job)
            kind = "cancel"
        else:
            kind = "lost" if isinstance(error, errors.TaskLostError) else "fail"
        self._write(kind, jobs, time, why)
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
            self._write("cancel", (following,), time, why)
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
                    if decision.others and any(map(_plain, self.running)):  # else the first one failed
                        self._launch_behind(decision, decision.others, now)
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
        self._enough = self._behind // 2 if self._trains else 0
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
            return self._launch_behind(decision, (job,), now)
        if len(self.running) >= self.limit:
            raise self._wrong(f"launched {job.task.name!r} where {self.limit} run already")
        if not (self._queue.unrestricted or self.admission.allowed(job)):
            return False
        task = job.task
        placement, why = _placed(decision)
        job.placement, self._launching = placement, job
        try:
            self.executor.launch(job, placement)
        except Exception as error:  # a launch that fails is the task's failure, not the scheduler's
            self._leave_queue((job,))
            self._finish((job,), now, State.FAILED, error, {"error": repr(error)})
            return True
        finally:
            self._launching = None
        self._leave_queue((job,)).running += 1
        job.state = RUNNING
        job.since = now
        if job.started is None:
            job.started = now
        if task.known is not None:
            job.alone = placement.workers is None and not self.running and not job.preemptions
        for other in self.running:
            other.alone = False
        self._launches += 1
        self.running.append(job)
        self._write("launch", (job,), now, why)
        return True

    def _leave_queue(self, jobs: Sequence[Job]) -> Account:
        """Take jobs out of their queue and give them their memory; return the account of their tenant."""
        self._queue.launched(jobs)
        account = self.tenants[jobs[0].task.tenant]
        account.waiting -= len(jobs)
        if jobs[0].task.memory:
            self.admission.admit(jobs)
        return account

    def _launch_behind(self, decision: Launch, jobs: Sequence[Job], now: float) -> bool:
        """Put a job into a train, the shortest by default, or several that differ in nothing but their number.

        What the executor cannot put behind another is launched at its turn.
        """
        job, name = jobs[0], jobs[0].task.name
        if decision.behind is not None:
            heads = [decision.behind]
            if heads[0] not in self.running:
                raise self._wrong(f"launched {name!r} behind {heads[0].task.name!r}, which is {heads[0].state.value}")
        else:
            heads = [its for its in self.running if _plain(its)]
            if not heads or not decision.placement.plain or self._behind + len(jobs) > self.policy.ahead:
                raise self._wrong(f"launched {name!r} where {len(self.running)} run already")
        if not (self._queue.unrestricted or self.admission.allowed(job)):
            return False
        placement, why = _placed(decision)
        trains = self._trains
        lengths = [len(trains[its]) if its in trains else 0 for its in heads]
        for head, part in _dealt(jobs, heads, lengths):
            train = trains.get(head) or Train()
            last = next((its for its in reversed(train) if its.state is RUNNING), head)
            if train.given == len(train):
                try:
                    train.given += self._give(part, placement, last)
                except Exception as error:
                    if len(jobs) == 1:  # a launch that fails is the task's failure, not the scheduler's
                        self._leave_queue(jobs)
                        self._finish(jobs, now, State.FAILED, error, {"error": repr(error)})
                        return True
                    # of several, it comes out of the launch of each, when its turn comes
            train += part
            trains[head] = train
            for its in part:
                its.train, its.placement, its.state, its.since = train, placement, RUNNING, now
            if decision.relieves is not None and train.given == len(train):
                why = self._relieve_when(decision.relieves, job, why)
            self._write("launch", part, now, why, "behind", [last.number, *[its.number for its in part]])
        job.alone = False  # of several, none was
        self._leave_queue(jobs).running += len(jobs)
        if placement.plain:
            self._trained += len(jobs)
        else:
            self._launches += 1
        return True

    def _give(self, jobs: Sequence[Job], placement: Placement, last: Job) -> int:
        """Give the executor jobs to begin behind another, and return how many it takes."""
        self._launching = jobs[0]
        try:
            if len(jobs) == 1:
                return self.executor.launch_behind(jobs[0], placement, last)
            return self.executor.launch_train(jobs, placement, last)
        finally:
            self._launching = None

    def _relieve_when(self, mate: Job, job: Job, why: dict[str, Any]) -> dict[str, Any]:
        """Have a running job relieved when another begins, if the executor can; return what the log says."""
        relieves, failed = _ask(self.executor.relieve_when, mate, job)
        if not relieves:
            return {**why, **failed}
        self._relieves[job] = mate
        return {**why, "relieves": mate.number}

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
        if job.train is None:
            job.ran += now - job.since
        job.since = now
        here = job.train is not None and job.train.index(job) >= job.train.given
        failed = {} if here else _ask(self.executor.preempt, job, mode)[1]
        why = {**why, "mode": mode, "saved": None, **failed}
        self._unsaved.append((why, job, job.placement, self.running.copy()))
        self._write("preempt", (job,), now, why)
        if here:
            self._happened(Stopped(job, now, job.done), ())

    def _saved(self, job: Job, placement: Placement | None, running: list[Job]) -> dict[str, float]:
        """Return the inputs of the source's cost formula, for a fit: bytes of one multiprocessor."""
        task = job.task
        blocks = min(task.profile.resident, task.blocks)
        if placement is not None and placement.workers is not None:
            blocks = min(blocks, placement.workers)
        each = -(-blocks // self.executor.capacity.processors)
        misses = [other.task.profile.miss_rate for other in running if other is not job]
        return {"bytes": (task.profile.registers + task.profile.shared) * each, "miss_rate": max(misses, default=0.0)}

    def _resize(self, decision: Resize, now: float) -> None:
        job, placement = decision.job, decision.job.placement
        if placement is None or job.state is not RUNNING or placement.plain:
            return
        workers, younger = decision.workers, decision.younger
        if placement.workers == workers and not younger:
            return
        if job.train is not None:
            raise self._wrong(f"resized {job.task.name!r}, whose turn has not come")
        job.alone = False
        job.placement = replace(placement, workers=workers)
        self._launches += 1
        why = {**decision.why, "workers": workers}
        if younger:
            self.running.remove(job)
            self.running.append(job)
            why["younger"] = True
        self._write("resize", (job,), now, {**why, **_ask(self.executor.resize, job, workers, younger)[1]})

    def _hold(self, decision: Hold, now: float) -> None:
        """Log a preemption that was weighed and not done, once for the same newcomer beside the same kernels."""
        if decision.again is not None:
            self._look_again = now + decision.again
        key = (decision.job.number, *(job.number for job in self.running))
        if key != self._held:
            self._held = key
            self._write("hold", (decision.job,), now, decision.why)

    # -- the log -------------------------------------------------------------------------------------------
    def _write(
        self,
        kind: str,
        jobs: Sequence[Job],
        time: float,
        why: dict[str, Any],
        key: str = "",
        values: Sequence[Any] = (),
    ) -> None:
        """Note what happened to a job, or to several that differ in nothing but their number; see `Many`.

        It is in the log when a step has ended: what the device is to do comes first.
        """
        if kind in self.log.kinds:
            job, task = jobs[0], jobs[0].task
            if len(jobs) == 1:
                its = {**why, key: values[0]} if values else why
                self._unwritten.append((time, kind, job.number, task.name, task.tenant, its))
            else:
                self.write_out()
                numbers = [job.number for job in jobs]
                times = [job.since for job in jobs]
                self.log.note_many(Many(kind, task.name, task.tenant, numbers, times, why, key, values))

    def write_out(self) -> None:
        """Write what was noted to the log: each step does, and who ends after one that raised."""
        for why, job, placement, running in self._unsaved:
            why["saved"] = self._saved(job, placement, running)
        self._unsaved.clear()
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, []
            self.log.note(unwritten)

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


def _dealt(jobs: Sequence[Job], heads: Sequence[Job], lengths: list[int]) -> list[tuple[Job, Sequence[Job]]]:
    """Return which jobs go behind which heads with trains of these lengths, one after the other into the shortest."""
    if len(jobs) == 1:
        return [(heads[lengths.index(min(lengths))], jobs)]
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
    return [(head, part) for head, part in zip(heads, parts, strict=True) if part]
