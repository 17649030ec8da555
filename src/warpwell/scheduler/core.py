"""Core: executes a policy's decisions, manages places, memory, quotas and the order of data, and writes the log."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import errors
from .._check import checked_integer
from .admission import Admission
from .batch import Batch
from .data_order import DataOrder
from .events import Event, Log
from .executor import Ended, Executor, Stopped
from .policy import Hold, Launch, Policy, Preempt, Rates, Resize, View
from .predict.rates import ClassRates
from .task import CANCELLED, DONE, PREEMPTED, RUNNING, STOPPING, Job, Placement, Request, State, Task
from .tenants import Tenant, Tenants
from .waiting import Waiting

if TYPE_CHECKING:
    from .predict.learner import Learner

OVERHEAD_WEIGHT_FASTER, OVERHEAD_WEIGHT_SLOWER = 0.2, 0.05
"""Weights of a measured decision latency in the average of latencies, if it is shorter or longer than that average. A
longer latency counts less, because other threads may have delayed it. Chosen, not fitted."""

MAX_OVERHEAD_SECONDS = 0.5e-3
"""Longest decision latency that counts. Longer ones, such as compilation, happen once (H200: 0.15 to 0.4 ms)."""


class Core:
    """A scheduler without a clock, threads or random numbers: time comes from the executor.

    Call `step` after a submission, when the executor has events, and at the time that the last step returned. Equal
    requests on an equal executor give an equal log.

    Tasks that use the same memory run in the order of their submission, unless all of them only read it
    (`Task.accesses`). A task that fails or is cancelled frees its place and memory and ends its request: later tasks of
    the request are cancelled. All other tasks continue, including tasks that wait for its data.

    Parameters
    ----------
    executor : Executor
    policy : Policy or str
        A policy, or its name (`warpwell.scheduler.policies.policy`).
    limit : int
        Maximum number of kernels that run at the same time.
    rates : Rates, optional
        Estimates of how fast kernels run together. By default `warpwell.scheduler.predict.rates.ClassRates`.
    tenants : mapping or iterable, optional
        Settings of tenants; see `Tenants`.
    log : Log, optional
        The log that events are written to.
    patience : int
        Number of later tasks that may be admitted before a task that does not fit into memory. After that, memory is
        kept free for it.
    keep : bool
        Whether `jobs` keeps jobs that have ended.
    trusts : bool
        Whether policies may rely on times that submitters gave (`View.trusts`).
    learner : Learner, optional
        Receives the times of kernels that had the whole device to themselves.

    Attributes
    ----------
    running : list of Job
        Running jobs in the order of residency.
    log : Log
    tenants : Tenants
    admission : Admission
        Decides which tasks may have memory now.
    ended : list of Job or None
        Jobs that have ended since the caller last emptied the list. None (default): ended jobs are not collected.
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
        self._order: DataOrder[Job] = DataOrder()
        self._due: set[Job] = set()
        self._cancelling: set[Job] = set()
        self._held: tuple[int, ...] = ()
        self._launches = 0
        self._look_again: float | None = None
        self._trains: dict[Job, deque[Job]] = {}
        self._launching: Job | None = None
        self._unwritten: list[Event] = []
        self._queue = Waiting(policy.bucket, policy.key, self.admission.allowed)
        self._view = View(
            executor.now(),
            self.running,
            self._queue,
            limit,
            rates or ClassRates(),
            executor.cost,
            executor.capacity,
            self.tenants,
            trains=self._trains,
            trusts=trusts,
        )

    @property
    def waiting(self) -> list[Job]:
        """Jobs that wait to be launched, or launched again, in order of arrival."""
        return self._queue.everything

    @property
    def first_waiting(self) -> Job | None:
        """The oldest job that quotas and memory allow to launch now."""
        return self._queue.first()

    @property
    def jobs(self) -> list[Job]:
        """All jobs in order of submission; without `keep`, those that have not ended."""
        return list(self._jobs.values())

    @property
    def busy(self) -> bool:
        """Whether a task runs, waits to be launched, or is still to arrive."""
        return bool(self.running or self._queue.count or self._arrivals)

    @property
    def blocked(self) -> bool:
        """Whether a task waits for the data of another task, or for an event (`submit`)."""
        return bool(self._due)

    def welcomes(self, request: Request) -> bool:
        """Return True if `submit` is sure to accept a request. Any thread may call this: it reads only constants."""
        memory = self.executor.capacity.memory
        return not self.tenants.named and all([task.memory - task.resident_bytes <= memory for task in request.tasks])

    def submit(self, request: Request, after: Iterable[Hashable] = ()) -> list[Job]:
        """Accept a request. Its first task arrives at ``request.arrival``, and each later task when the previous one
        ends.

        Parameters
        ----------
        request : Request
        after : iterable of hashable
            Events that the first task waits for; `release` reports each event. No event may be a job.

        Returns
        -------
        list of Job
            One job for each task.

        Raises
        ------
        TaskMemoryError
            A task is larger than the device's memory or than its tenant's quota. Nothing of the request is accepted.
        QuotaError
            Tenants have settings, but no setting names this tenant.
        """
        accounts = [self.tenants.account(task.tenant) for task in request.tasks]
        for task, account in zip(request.tasks, accounts, strict=True):
            if not task.memory:
                continue
            needs, memory = task.memory - task.resident_bytes, self.executor.capacity.memory
            bounds = ((needs, memory, "the device has"), (task.memory, account.memory, "its tenant may hold"))
            for nbytes, limit, owner in bounds:
                if limit is not None and nbytes > limit:
                    why = {"rule": "memory", "bytes": nbytes, "most": limit}
                    now = self.executor.now()
                    self._unwritten.append(Event(now, "reject", self._number, task.name, task.tenant, why))
                    self.write_out()
                    raise errors.TaskMemoryError(
                        f"task {task.name!r} needs {nbytes} bytes, but {owner} {limit}: make it smaller, or split it",
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
            job.after = self._order.add(job, task.accesses, () if jobs else after)
            if jobs:
                self._next[jobs[-1]] = job
            jobs.append(job)
        self._number = max(self._number, first + len(jobs))
        heapq.heappush(self._arrivals, (request.arrival, jobs[0].number, jobs[0]))
        return jobs

    def release(self, event: Hashable) -> None:
        """Let tasks arrive that wait only for this event (see `submit`)."""
        self._released(event, self.executor.now())

    def _counts_memory(self, task: Task) -> None:
        if task.memory > task.resident_bytes or (task.memory and self.tenants.named):
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
        for event in executor.poll():
            if arrivals and arrivals[0][0] <= event.time:
                self._arrive_until(event.time)
            self._record_outcome(event)
        now = executor.now()
        if arrivals and arrivals[0][0] <= now:
            self._arrive_until(now)
        self.tenants.charge(self.running, now)
        if self._queue.count or (self.running and self.policy.adjusts):
            self._decide(now)
        times = [arrivals[0][0] if arrivals else None]
        if self._queue.count:
            if self.policy.period is not None:
                times.append(now + self.policy.period)
            times.append(self._look_again)
            if self.admission.barred:
                times.append(self.tenants.wake(now))
        return min([time for time in times if time is not None], default=None)

    def cancel(self, job: Job, why: dict[str, Any] | None = None) -> bool:
        """End a job and its request. A running job is requested to leave, and ends when it has left.

        Parameters
        ----------
        job : Job
        why : dict, optional
            The reason for the log if the job does not run. Default: the caller requested it.

        Returns
        -------
        bool
            False if the job has already ended, or if the job itself calls this during its launch. A running job whose
            last block ends before it leaves is done, not cancelled.
        """
        if job.state in (DONE, State.FAILED, CANCELLED) or job is self._launching:
            return False
        try:
            self._cancel(job, self.executor.now(), why or {"rule": "asked"})
        finally:
            self.write_out()
        return True

    def _cancel(self, job: Job, now: float, why: dict[str, Any]) -> None:
        if job.state in (RUNNING, STOPPING):
            self._cancelling.add(job)
            self._drop_rest(job, now, {"rule": "cancelled before it", "by": job.number})
            if job.state is RUNNING and self.may_leave(job):
                self._leave(job, now, "drain", {"rule": "cancelled"})
            return
        if job in self._queue:
            self._queue.remove(job)
            self.tenants[job.task.tenant].waiting -= 1
        else:
            self._due.discard(job)
            self._arrivals = [entry for entry in self._arrivals if entry[2] is not job]
            heapq.heapify(self._arrivals)
            before = next((j for j, n in self._next.items() if n is job), None)
            if before is not None:
                del self._next[before]
        self._finish(job, now, CANCELLED, None, why)

    def may_leave(self, job: Job) -> bool:
        """Whether a running job leaves on request: it is not launched unmodified, or waits in a launch queue."""
        return job.train is not None or not _plain(job)

    # -- what happens --------------------------------------------------------------------------------------
    def _arrive_until(self, time: float) -> None:
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] <= time:
            self._arrive(heapq.heappop(arrivals)[2])

    def _arrive(self, job: Job) -> None:
        """Let a job wait to be launched, unless the job still waits for data."""
        if self._order.is_waiting(job):
            self._due.add(job)
        else:
            self._enqueue(job)

    def _enqueue(self, job: Job, behind: bool = False) -> None:
        """Add a job to the queue; with `behind`, the job still waits for the data of jobs in a launch queue."""
        task = job.task
        if job.state is PREEMPTED:  # withdrawn from a launch queue
            self.tenants.add_waiting(self.tenants.account(task.tenant))
            self._queue.add(job)
            return
        if task.known is not None:
            task.profile = task.known.profile  # the kernel may have been measured since the submission
        self.executor.prepare(job)
        job.since = job.arrival
        self.tenants.add_waiting(self.tenants.account(task.tenant))
        self._queue.add(job)
        submitted = task.priority  # the tenant's ceiling may lower it
        why: dict[str, Any] = {} if job.priority == submitted else {"submitted": submitted, "priority": job.priority}
        if job.after:
            why["after"] = list(job.after)
        if behind:
            why["behind"] = True
        self._write("arrive", job, job.arrival, why)

    def _released(self, event: Hashable, time: float) -> None:
        """Let the jobs arrive that an event, or the end of a job, releases."""
        for job in self._order.release(event):
            if job in self._due:
                self._due.discard(job)
                job.arrival = max(job.arrival, time)
                self._arrive(job)

    def _record_outcome(self, event: Ended | Stopped) -> None:
        """Record that a job has ended or stopped."""
        job, time = event.job, event.time
        self.tenants.charge(self.running, time)
        self._leave_place(job, time)
        self.tenants[job.task.tenant].running -= 1
        if isinstance(event, Stopped):
            job.done, job.placement = event.done, None
            self._write("stop", job, time, {"done": event.done})
            if job in self._cancelling:
                self._finish(job, time, CANCELLED, None, {"rule": "asked"})
                return
            job.state = PREEMPTED
            job.preemptions += 1
            self._arrive(job)  # it may have left a launch queue before the jobs whose data it uses
        elif event.error is not None:
            self._finish(job, time, State.FAILED, event.error, {"error": repr(event.error)})
        else:
            why: dict[str, Any] = {"ran": job.ran, "preemptions": job.preemptions}
            if job.prepared:
                why["prepared"] = job.prepared
            if event.seconds is not None and job.alone:
                why["alone"] = event.seconds
                if self._learner is not None and self._learner.learn(job.task, event.seconds):
                    self._renew(job.task.known, time)
            self._finish(job, time, DONE, None, why)

    def _leave_place(self, job: Job, time: float) -> None:
        """Remove a job from its launch queue, or from `running`, where the next job of its launch queue replaces it."""
        if job.train is not None:
            self._leave_train(job)
            job.since = time
            return
        job.ran += time - job.since
        job.since = time
        position = self.running.index(job)
        train = self._trains.pop(job, None)
        if not train:
            del self.running[position]
            return
        following = train.popleft()
        following.train = None
        if _plain(job) and _plain(following):
            self.running[position] = following
        else:
            del self.running[position]
            self.running.append(following)  # its workers are the youngest
        following.since = time
        if following.started is None:
            following.started = time
        if train:
            self._trains[following] = train

    def _leave_train(self, job: Job) -> None:
        """Remove a job from its launch queue."""
        train, job.train = job.train, None
        assert train is not None
        train.remove(job)
        if not train:
            del self._trains[next(head for head, queued in self._trains.items() if queued is train)]

    def _renew(self, known: Any, now: float) -> None:
        """Set the profile that was just measured in waiting jobs of the same code and size."""
        for job in self._queue.all_of(known):
            self._queue.remove(job)
            self.policy.ended(job, now)
            job.task.profile = known.profile
            self._queue.add(job)

    def _finish(self, job: Job, time: float, state: State, error: BaseException | None, why: dict[str, Any]) -> None:
        """End a job that is in no list any more; start the next job of its request, or cancel the rest."""
        if state is DONE:
            job.done = job.task.blocks
        job.placement, job.error = None, error
        if job.task.memory:
            self.admission.release_job(job)
        self._cancelling.discard(job)
        if state is CANCELLED:
            self.executor.discard(job)
        kind = _KINDS[state]
        self._end(job, time, state, "lost" if isinstance(error, errors.TaskLostError) else kind, why)
        self.policy.ended(job, time)
        if state is DONE:
            following = self._next.pop(job, None)
            if following is not None:
                following.arrival = time
                self._arrive(following)
        else:
            self._drop_rest(job, time, {"rule": f"{state.value} before it", "by": job.number})
        self._released(job, time)

    def _end(self, job: Job, time: float, state: State, kind: str, why: dict[str, Any]) -> None:
        job.state, job.since, job.ended = state, time, time
        if not self._keep:
            del self._jobs[job.number]
        if self.ended is not None:
            self.ended.append(job)
        self._write(kind, job, time, why)

    def _drop_rest(self, job: Job, time: float, why: dict[str, Any]) -> None:
        following = self._next.pop(job, None)
        while following is not None:
            self._end(following, time, CANCELLED, "cancel", why)
            self._released(following, time)
            following = self._next.pop(following, None)

    # -- decisions ------------------------------------------------------------------------------------------
    def _decide(self, now: float) -> None:
        view, policy, admission, executor = self._view, self.policy, self.admission, self.executor
        view.now = now
        before = self._launches
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
            view.followers = self._followers() if self._due and not self._queue.count else ()
            for decision in policy.decide(view):
                if isinstance(decision, Launch):
                    is_launched = self._launch(decision, now)
                    if is_launched is None:
                        break  # no later job may overtake this job
                    again |= is_launched
                elif isinstance(decision, Preempt):
                    if not self._preempt(decision, now):
                        break  # later decisions rely on this preemption
                elif isinstance(decision, Resize):
                    self._resize(decision, now)
                else:
                    self._log_hold(decision, now)
            if not (self._queue.count or self._due):
                break
            if not again and not spare and admission.barred and len(self.running) < self.limit:
                # Tenants that may burst get places that no tenant within its quota takes.
                again = spare = True
        view.followers = ()  # else the view would keep arguments alive
        if self._launches != before:
            seconds = min(executor.now() - now, MAX_OVERHEAD_SECONDS)
            weight = OVERHEAD_WEIGHT_FASTER if seconds < view.overhead else OVERHEAD_WEIGHT_SLOWER
            view.overhead += weight * (seconds - view.overhead)

    def _launch(self, decision: Launch, now: float) -> bool | None:
        """Launch a job; return False if it may not be launched now, and None if the executor cannot queue it."""
        job, name = decision.job, decision.job.task.name
        waits_for_data = job in self._due and (job, decision.behind) in self._followers()
        if not waits_for_data and job not in self._queue:
            raise self._mistake(f"launched {name!r}, which is {job.state.value}")
        if waits_for_data and not decision.placement.plain:
            raise self._mistake(f"launched {name!r}, which waits for data, without plain")
        head = self._head_of(decision)
        if waits_for_data:
            job.arrival = max(job.arrival, now)  # set before `allowed`, which keeps memory free for older jobs
        if not (self._queue.unrestricted or self.admission.allowed(job)):
            if waits_for_data:
                self.admission.pass_over(job)
            return False
        placement, why = _placed(decision)
        if head is not None:
            return self._launch_behind(job, head, placement, why, now)
        job.placement = placement
        if not self._launch_on_device(job, now, lambda: self.executor.launch(job, placement)):
            return True
        job.state = RUNNING
        job.since = now
        if job.started is None:
            job.started = now
        if job.task.known is not None:
            job.alone = placement.workers is None and not self.running and not job.preemptions
        for running in self.running:
            running.alone = False
        self._launches += 1
        self.running.append(job)
        self._write("launch", job, now, why)
        return True

    def _head_of(self, decision: Launch) -> Job | None:
        """Return the running job whose launch queue a job enters, by default the shortest; None: no queue."""
        name, head = decision.job.task.name, decision.behind
        if head is not None:
            if head not in self.running:
                raise self._mistake(f"launched {name!r} behind {head.task.name!r}, which is {head.state.value}")
            return head
        if len(self.running) < self.limit:
            return None
        heads = [head for head in self.running if _plain(head)]
        queued = sum(map(len, self._trains.values()))
        if not heads or not decision.placement.plain or queued >= self.policy.ahead:
            raise self._mistake(f"launched {name!r} although {len(self.running)} run already")
        return min(heads, key=lambda running: len(self._trains.get(running, ())))

    def _followers(self) -> list[tuple[Job, Job]]:
        """Return jobs that wait only for data of a single launch queue, each with the running job of that queue.

        Only a queue of unmodified launches counts: its running job cannot be preempted, and the device keeps its order.
        """
        found = []
        for head in self.running:
            members = (head, *self._trains.get(head, ()))
            if all([self._can_be_followed(member) for member in members]):
                found += [
                    (job, head)
                    for job in self._order.followers(members)
                    if job in self._due and not isinstance(job.task.launch, Batch)
                ]
        return found

    def _can_be_followed(self, job: Job) -> bool:
        return job.state is RUNNING and _plain(job) and not job.task.whole and self.executor.completes_on_device(job)

    def _launch_on_device(self, job: Job, now: float, launch: Callable[[], bool | None]) -> bool | None:
        """Launch a waiting job: remove it from the queue and allocate its memory.

        Return False if the task failed, and None if ``launch()`` returned False: the job still waits.
        """
        self._launching, failure = job, None
        try:
            if launch() is False:
                return None
        except Exception as error:  # the task has failed, not the scheduler
            failure = error
        finally:
            self._launching = None
        if job in self._due:
            self._due.discard(job)
            self._enqueue(job, behind=True)
        self._queue.launched(job)
        account = self.tenants[job.task.tenant]
        account.waiting -= 1
        if job.task.memory:
            self.admission.admit(job)
        if failure is not None:
            self._finish(job, now, State.FAILED, failure, {"error": repr(failure)})
            return False
        account.running += 1
        return True

    def _launch_behind(self, job: Job, head: Job, placement: Placement, why: dict[str, Any], now: float) -> bool | None:
        """Add a job to the launch queue of a running job; return None if the executor cannot queue the job."""
        train = self._trains.get(head) or deque()
        last = next((queued for queued in reversed(train) if queued.state is RUNNING), head)
        launched = self._launch_on_device(job, now, lambda: self.executor.launch_behind(job, placement, last))
        if not launched:
            return None if launched is None else True
        train.append(job)
        self._trains[head] = train
        job.train, job.placement, job.state, job.since, job.alone = train, placement, RUNNING, now, False
        self._write("launch", job, now, {**why, "behind": last.number})
        if not placement.plain:
            self._launches += 1
        return True

    def _preempt(self, decision: Preempt, now: float) -> bool:
        """Preempt a job; return False if this must wait until the tenant of the arriving task is within its quota."""
        job = decision.job
        if job.state is not RUNNING:
            raise self._mistake(f"preempted {job.task.name!r}, which is {job.state.value}")
        if not self.may_leave(job):
            raise self._mistake(f"preempted {job.task.name!r}, which was launched plain")
        newcomer = decision.newcomer
        if newcomer is not None and self.tenants.must_yield(newcomer.task.tenant, job.task.tenant):
            within = self.tenants.wake(now)
            again = None if within is None else within - now
            self._log_hold(Hold(newcomer, {**decision.why, "rule": "over quota"}, again), now)
            return False
        for following in [*self._trains.get(job, ())][::-1]:
            if following.state is RUNNING:  # the queued job must not begin in the place of `job`
                self._leave(following, now, "drain", {**decision.why, "ahead": True})
        self._leave(job, now, decision.mode, {**decision.why, "for": None if newcomer is None else newcomer.number})
        return True

    def _leave(self, job: Job, now: float, mode: str, why: dict[str, Any]) -> None:
        train = self._trains.get(job, ()) if job.train is None else job.train
        for following in [*train][::-1]:
            if following.state is RUNNING and self._order.follows(following, job):  # the queued job uses data of `job`
                self._leave(following, now, "drain", {**why, "ahead": True})
        job.state = STOPPING
        if job.train is None:
            job.ran += max(0.0, now - job.since)  # the decision may have begun before a run was prepared
        job.since = now
        self._write("preempt", job, now, {**why, "mode": mode, **_failure_of(self.executor.preempt, job, mode)})

    def _resize(self, decision: Resize, now: float) -> None:
        job, placement = decision.job, decision.job.placement
        if placement is None or job.state is not RUNNING or placement.plain:
            return
        workers, younger = decision.workers, decision.younger
        if placement.workers == workers and not younger:
            return
        if job.train is not None:
            raise self._mistake(f"resized {job.task.name!r}, which has not started")
        job.alone = False
        job.placement = replace(placement, workers=workers)
        self._launches += 1
        why = {**decision.why, "workers": workers}
        if younger:
            self.running.remove(job)
            self.running.append(job)
            why["younger"] = True
        self._write("resize", job, now, {**why, **_failure_of(self.executor.resize, job, workers, younger)})

    def _log_hold(self, decision: Hold, now: float) -> None:
        """Log a preemption that was considered and declined, once for the same arriving task and running kernels."""
        if decision.again is not None:
            self._look_again = now + decision.again
        key = (decision.job.number, *(job.number for job in self.running))
        if key != self._held:
            self._held = key
            self._write("hold", decision.job, now, decision.why)

    # -- the log -------------------------------------------------------------------------------------------
    def _write(self, kind: str, job: Job, time: float, why: dict[str, Any]) -> None:
        """Record an event. The log gets it at the end of the step, because commands to the device come first."""
        if kind in self.log.kinds:
            self._unwritten.append(Event(time, kind, job.number, job.task.name, job.task.tenant, why))

    def write_out(self) -> None:
        """Write the recorded events to the log. Each step calls this; call it after a step that raised an error."""
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, []
            for event in unwritten:
                self.log.add(event)

    def _mistake(self, mistake: str) -> errors.SchedulerError:
        return errors.SchedulerError(f"policy {self.policy.name!r} {mistake}: correct the policy")


def _failure_of(change: Callable[..., None], *arguments: Any) -> dict[str, str]:
    """Change a running job by a method of the executor; return the log entry of an error (see `Executor`)."""
    try:
        change(*arguments)
    except errors.TaskLostError:
        raise
    except Exception as error:  # the job and all others continue
        return {"error": repr(error)}
    return {}


def _plain(job: Job) -> bool:
    return job.placement is not None and job.placement.plain


def _placed(decision: Launch) -> tuple[Placement, dict[str, Any]]:
    """Return the placement and the log entry of a launch. A task that cannot be cut into blocks runs unmodified."""
    placement, why, task = decision.placement, decision.why, decision.job.task
    if task.whole:
        placement = replace(placement, plain=True, workers=None)
        why = {**why, "whole": task.whole}
    if isinstance(task.launch, Batch):
        placement = replace(placement, plain=False, workers=None)
    if placement.plain:
        why = {**why, "plain": True}
    elif placement.workers is not None:
        why = {**why, "workers": placement.workers}
    return placement, why


_KINDS = {DONE: "end", CANCELLED: "cancel", State.FAILED: "fail"}
"""Kinds of events, by the state in which a job ends."""
