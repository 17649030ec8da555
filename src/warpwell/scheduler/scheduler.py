"""Scheduler: accepts kernels from users."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar, Unpack, cast

import numpy as np

from .. import errors, registry
from .._check import checked_callable, checked_device
from ..targets import Launch, default_device, is_argument
from .accesses import accesses_of
from .batch import BATCH_LAUNCH_SECONDS, batched
from .callables import Call, as_launch, at_present
from .core import Core
from .data_order import Access, DataOrder
from .dispatcher import Dispatcher, Watchdog
from .events import DEFAULT_MAX_EVENTS, Log
from .executor import Executor
from .executors import executor_of
from .handle import Handle, RequestHandle, TaskFuture
from .policy import Policy
from .predict.learner import Learner
from .task import Prepared, Profile, Request, Task, TaskOptions, checked_size, require_profile
from .tenants import Tenant
from .tensors import shared

T = TypeVar("T")

_PREPARED = "a prepared launch has its own arguments and options: pass them to prepare"


class Scheduler:
    """Shares a device between kernels that are submitted at any time, from any thread.

    A scheduler is a context manager. Leaving the block waits for all tasks; an exception in the block, such as Ctrl-C,
    cancels them. At the end of the program, tasks of a scheduler that was not closed are cancelled.

    Parameters
    ----------
    device : str, optional
        "cuda" or "cpu"; default: the GPU, if there is one.
    devices : Devices or iterable of Device, optional
        Devices of a pool, instead of `device`: each task is placed on one of them (see `PoolScheduler`).
    policy : str or Policy
        The policy, which chooses the kernels that run, or its name (see `warpwell.scheduler.policies.policy`).
    limit : int, optional
        Maximum number of kernels that run at the same time; default 2.
    tenants : mapping or iterable of Tenant, optional
        Weights and quotas; see `warpwell.scheduler.tenants`.
    analyzer : callable, optional
        ``analyzer(task)`` returns the `Profile` of a task that was submitted without one. By default a `Learner`, which
        measures kernels that run alone, and keeps the results for this device in the user's cache folder for later
        schedulers. A kernel that was not measured yet runs alone once.
    executor : Executor or callable, optional
        An executor instead of the device's, or a function that makes one in the scheduler's thread. The scheduler
        closes it.
    stuck_after : float or None
        Timeout, in seconds, of a task in which no block begins or ends. It must be longer than any block takes. None:
        no timeout.
    log : Log, optional
        The log of decisions. By default the last 16,384 events are kept, and `Log.dropped` counts the others; pass a
        `Log()` to keep all. ``with open("log.jsonl", "w") as file: scheduler.log.write(file)`` saves it for ``warpwell
        sched explain``.

    Raises
    ------
    ArgumentError
        An option is invalid.
    QuotaError
        The quotas of tenants exceed 100 %.
    DeviceNotFoundError
        The device does not exist.

    Examples
    --------
    >>> import numpy as np, warpwell as ww
    >>> from warpwell import gpu
    >>> @ww.kernel
    ... def double(x):
    ...     i = gpu.grid(1)
    ...     if i < x.size:
    ...         x[i] = 2 * x[i]
    >>> x = np.arange(4)
    >>> with ww.scheduler.Scheduler("cpu") as scheduler:
    ...     scheduler.submit(double[4], x).result()
    >>> x.tolist()
    [0, 2, 4, 6]
    """

    _new_order = DataOrder

    def __new__(cls, *args: Any, devices: Any = None, **options: Any) -> Scheduler:
        """Create a `PoolScheduler` if devices of a pool are given."""
        if devices is None:
            return super().__new__(cls)
        made: type[Scheduler] = registry.load(registry.stand_ins["schedulers"]) if cls is Scheduler else cls
        return super().__new__(made)

    def __init__(
        self,
        device: str | None = None,
        policy: str | Policy = "lanes",
        *,
        limit: int | None = None,
        tenants: Mapping[str, Any] | Iterable[Tenant] | None = None,
        analyzer: Callable[[Task], Profile] | None = None,
        executor: Executor | Callable[[], Executor] | None = None,
        stuck_after: float | None = 60.0,
        log: Log | None = None,
        devices: None = None,
    ) -> None:
        if devices is not None:
            raise errors.ArgumentError("devices= is for Scheduler itself: inherit from PoolScheduler", name="devices")
        self.device = checked_device(device or default_device(), among=("cpu", "cuda"))
        checked_callable(analyzer, "analyzer")
        if not isinstance(executor, Executor):
            checked_callable(executor, "executor")
        if not isinstance(policy, str | Policy):
            raise errors.ArgumentError(f"policy is {policy!r:.60}: give a name, or a Policy", name="policy")
        if not isinstance(log, Log | None):
            raise errors.ArgumentError(f"log is {log!r:.60}: give a Log of warpwell.scheduler.extend", name="log")
        self.log = feed = Log(max_events=DEFAULT_MAX_EVENTS) if log is None else log
        self._analyzer: Callable[[Task], Profile] | None = Learner(saves=True) if analyzer is None else analyzer
        self._learner = learner = self._analyzer if isinstance(self._analyzer, Learner) else None
        made = executor if executor is not None else executor_of(self.device)

        def make() -> Core:  # no reference to this scheduler, because its garbage collection ends the thread
            running = made if isinstance(made, Executor) else made()
            try:
                return Core(
                    running,
                    policy,
                    limit=2 if limit is None else limit,
                    tenants=tenants,
                    log=feed,
                    keep=False,
                    learner=learner,
                    trusts=False,
                )
            except BaseException:
                running.close()
                raise

        self._dispatcher = Dispatcher(make, Watchdog(stuck_after))
        weakref.finalize(self, self._dispatcher.retire).atexit = False
        self._executor = self._dispatcher.core.executor
        if learner is not None:
            learner.use_device(self._executor.capacity, self._executor.machine)

    def submit(
        self,
        launch: Any,
        *args: Any,
        after: Future[Any] | Sequence[Future[Any]] = (),
        **options: Unpack[TaskOptions],
    ) -> Handle:
        """Submit a launch. The policy decides when it runs; do not use the arguments until the task has ended.

        If an earlier unfinished task of this scheduler uses the same array, the new task runs after the earlier one,
        unless both only read the array. So tasks on the same arrays have the same results as if they ran in the order
        of submission.

        Parameters
        ----------
        launch : Launch, callable, graph or Prepared
            ``kernel[n]``, without a stream. Or a function: ``launch(stream, *args)`` enqueues work of other libraries
            in a stream (the driver's handle as an int) and does not wait; on a CPU, the stream is None, and the
            function does the work itself. The scheduler's thread calls it, and makes no other decisions during the
            call. Or a captured graph of PyTorch, CuPy, cuda.core or the driver. Functions and graphs are never
            preempted. Or a launch that `prepare` returned, which has its own arguments and options.
        *args
            The arguments of the launch, or of the function after the stream. An array of another library whose address
            only DLPack provides is used in place.
        tenant, priority, deadline, size
            See `Task`.
        after : Handle or sequence of handles
            Tasks, or other futures, that must end before this task runs. If one of them fails or is cancelled, this
            task is cancelled.
        name : str, optional
            Default: the kernel's name.
        memory : int or str, optional
            Device memory that the task needs, in bytes or as "1GiB", if it needs more than its arrays.
        profile : Profile, optional
            The known profile of the task.
        order : {"data", "none"}
            "data" orders tasks by their arrays, as described above. With "none", the task does not wait for other tasks
            because of its arrays, and they do not wait for it.

        Raises
        ------
        ArgumentError
            The launch is empty or has a stream, an argument is on another device, or an option is invalid.
        TaskMemoryError
            The task needs more than the device's memory, or than its tenant's quota.
        QuotaError
            Tenants have settings, and no setting names this tenant.
        ClosedError
            The scheduler is closed.
        SchedulerError
            The scheduler has failed.
        ForkError
            The parent process created the scheduler or a task in `after`, and then forked this process.
        """
        if isinstance(launch, Prepared):
            if args or options:
                raise errors.ArgumentError(_PREPARED, name="args")
            task = launch.new_task()
        else:
            task = self.task(launch, *args, **options)
        return self.submit_request(Request(task.name, (task,)), after)[0]

    def prepare(self, launch: Any, *args: Any, **options: Unpack[TaskOptions]) -> Prepared:
        """Check a launch once, and return it in a form that costs less each time that it is submitted.

        Use it for kernels below a millisecond that are submitted many times with the same arguments.

        Parameters
        ----------
        launch, *args
            See `submit`. The items of arrays may change between submissions, but not the arrays' memory.
        **options
            Options of `submit`, except `after`.
        """
        return Prepared(self.task(launch, *args, **options))

    def submit_many(
        self,
        launches: Sequence[tuple[Any, ...] | Prepared],
        *,
        name: str | None = None,
        after: Future[Any] | Sequence[Future[Any]] = (),
        **options: Any,
    ) -> TaskFuture:
        """Submit a request of several launches, which run one after the other.

        If a launch fails or is cancelled, the later launches are cancelled. Consecutive launches of kernels that take
        less than 0.3 ms (as measured, or by their profiles) become one task if tenant, priority and deadline are equal.
        It can be preempted and cancelled between two launches.

        Parameters
        ----------
        launches : sequence of tuple or Prepared
            Each launch is a tuple ``(kernel[n], *args)``, or the result of `prepare`.
        name : str, optional
            Name of the request.
        **options
            Options of `submit`, for all launches except prepared ones, which have their own options.

        Returns
        -------
        Handle
            The future of the request. It fails with the error of the launch that failed.
        """
        tasks = self._batches(checked_launches(launches), name, options)
        handles = self.submit_request(Request(name or tasks[0].name, tasks), after)
        return handles[0] if len(handles) == 1 else RequestHandle(name or tasks[0].name, handles)

    def _batches(self, launches: Sequence[Any], name: str | None, options: dict[str, Any]) -> list[Task]:
        """Return the tasks of launches in order; consecutive short launches become one task."""
        distinct: dict[Any, Task] = {}
        tasks: list[Task] = []
        for launch in launches:
            is_prepared = isinstance(launch, Prepared)
            if is_prepared and options:
                raise errors.ArgumentError(_PREPARED, name=next(iter(options)))
            key = id(launch) if is_prepared else _key_of(launch)
            if key not in distinct:
                distinct[key] = launch.new_task() if is_prepared else self.task(*launch, **options)
            tasks.append(distinct[key])
        # Prepared launches have options of their own, and a batch has one tenant, priority and deadline.
        kinds = {t: (self._is_short(t), t.tenant, t.priority, t.deadline) for t in distinct.values()}
        found: list[Task] = []
        used: set[Task] = set()  # a request must not contain a task twice
        for (is_short, *_), group in itertools.groupby(tasks, kinds.__getitem__):
            listed = list(group)
            if is_short and len(listed) > 1:
                batch = {task: position for position, task in enumerate(dict.fromkeys(listed))}
                arrays = {id(array): array for task in batch for array in _arrays(task.arguments)}
                nbytes = sum(int(array.nbytes) for array in arrays.values())
                found.append(batched([*batch], [batch[task] for task in listed], name or listed[0].name, nbytes))
            else:
                for task in listed:
                    found.append(task.again() if task in used else task)
                    used.add(task)
        return found

    def _is_short(self, task: Task) -> bool:
        seconds, cut = task.profile.seconds, task.cut
        if seconds is None or seconds >= BATCH_LAUNCH_SECONDS or isinstance(task.launch, Call):
            return False
        return not getattr(cut, "participants", ()) and all(map(self._executor.keeps, _arrays(task.arguments)))

    def submit_request(self, request: Request, after: Future[Any] | Sequence[Future[Any]] = ()) -> list[Handle]:
        """Submit a request of tasks from `task`; see `submit_many`."""
        futures = list(after) if isinstance(after, Iterable) else [after]
        for future in futures:
            if not isinstance(future, Future):
                raise errors.ArgumentError(f"after= has {future!r:.80}: give handles", name="after")
            if isinstance(future, TaskFuture):
                future.require_process()  # in a forked process, this future would never end
        return self._accept(request, futures)

    def _accept(self, request: Request, after: Sequence[Future[Any]]) -> list[Handle]:
        """Make the handles of a request, and run it when all of `after` have succeeded."""
        handles = [Handle(self._dispatcher, task) for task in request.tasks]
        for index, handle in enumerate(handles):
            handle.after = handles[index - 1 : index] or after
        self._dispatcher.submit(request, handles, after)
        return handles

    def task(
        self,
        launch: Any,
        *args: Any,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        name: str | None = None,
        memory: int | str | None = None,
        profile: Profile | None = None,
        size: dict[str, float] | None = None,
        order: str = "data",
    ) -> Task:
        """Return the task of a launch, without submitting it. See `submit` for parameters and errors."""
        # Before the analyzer: another thread may have held its lock at the fork.
        self._dispatcher.require_process()
        launch, args = as_launch(launch, args)
        require_launch(launch)
        launch = at_present(launch)
        if not isinstance(launch, Call):
            args = shared(args, self.device)
        size = checked_size(size)
        blocks = launch.cut(args, self.device)
        args = blocks.args
        title = name or blocks.name
        runs_whole = None if blocks.preemptible else blocks.reason
        arrays = _arrays(args)
        task = Task(
            title,
            blocks.blocks,
            launch=launch,
            arguments=args,
            size=size or {},
            memory=cast(int, 0 if memory is None else memory),  # `Task` parses text
            whole=str(runs_whole or ""),
            cut=blocks,
            accesses=self._accesses(launch, args, order),
            tenant=tenant,
            priority=priority,
            deadline=deadline,
        )
        keeps = self._executor.keeps
        held = 0
        for array in arrays:
            nbytes = int(array.nbytes)
            held += nbytes
            if keeps(array):
                task.resident_bytes += nbytes
        task.memory = max(task.memory, held)
        if profile is None and self._analyzer is not None:
            profile = self._analyzer(task)
        task.profile = require_profile(profile, title)
        return task

    @staticmethod
    def _accesses(launch: Any, args: Sequence[Any], order: str) -> Sequence[Access]:
        """Return the memory by which a task is ordered."""
        if order not in ("data", "none"):
            raise errors.ArgumentError(f"order must be 'data' or 'none', got {order!r:.60}", name="order")
        return accesses_of(launch, args) if order == "data" else ()

    def inspect(self, function: Callable[[Core], T]) -> T:
        """Call ``function(core)`` in the scheduler's thread between two decisions; return its result (for metrics)."""
        return self._dispatcher.call(lambda: function(self._dispatcher.core))

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the scheduler before it was closed, or None. Its tasks fail with `TaskLostError`."""
        return self._dispatcher.failure

    def close(self, *, cancel: bool = False) -> None:
        """Accept no new tasks, and return when all accepted tasks have ended.

        Parameters
        ----------
        cancel : bool
            Cancel waiting tasks now, and running ones at the end of their blocks. A task that has not left after 10 s
            fails.
        """
        try:
            self._end(cancel)
        except KeyboardInterrupt:
            self._end(True)
            raise

    def _end(self, cancel: bool) -> None:
        if not self._dispatcher.close(cancel=cancel) or self._learner is None:
            return
        # Measurements can be repeated. At a fork another thread may have held the learner's lock.
        with contextlib.suppress(OSError, errors.ForkError):
            self._dispatcher.require_process()
            self._learner.save()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)


def require_launch(launch: Any) -> None:
    """Raise `ArgumentError` unless this is ``kernel[n]`` without a stream."""
    if not isinstance(launch, Launch):
        raise errors.ArgumentError(f"{launch!r:.80} is not a launch: pass kernel[n], and its arguments after it")
    if launch.stream is not None:
        raise errors.ArgumentError("a launch in a stream: the scheduler chooses when it runs; pass kernel[n]")


def checked_launches(launches: Any) -> list[Sequence[Any]]:
    """Return launches, each with its arguments, or raise `ArgumentError`."""
    found = list(launches) if isinstance(launches, Iterable) else [launches]
    if not found:
        raise errors.ArgumentError("launches is empty: pass at least one launch", name="launches")
    for launch in found:
        if not isinstance(launch, Prepared) and (not isinstance(launch, tuple | list) or not launch):
            raise errors.ArgumentError(f"{launch!r:.80} is not a tuple of kernel[n] and its arguments", name="launches")
    return found


def _key_of(launch: Sequence[Any]) -> Any:
    """Return a key that is equal for equal launches of a request: the same kernel, shape and objects."""
    first = launch[0]
    if type(first) is not Launch:
        return id(launch)
    return (first.kernel, first.shape, first.stream, *map(id, launch[1:]))


def _arrays(args: Sequence[Any]) -> list[Any]:
    """Return the arrays among arguments, each once, without arrays in files or on storage."""
    found: dict[int, Any] = {}
    for a in args:
        kind = type(a)
        if kind is int or kind is float:
            continue
        try:
            if not (hasattr(a, "nbytes") and hasattr(a, "dtype")):
                continue
        except RuntimeError as error:  # a sparse tensor of PyTorch
            message = f"an argument is a {kind.__name__} without memory of its own ({error}): make it dense"
            raise errors.ArgumentError(message, name="args") from error
        if not (isinstance(a, _NO_ARRAYS) or is_argument(a)):
            found[id(a)] = a
    return list(found.values())


_NO_ARRAYS = (np.memmap, np.generic)
