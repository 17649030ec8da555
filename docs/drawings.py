"""Draw the pictures of these pages: ``python -m docs.drawings`` writes docs/drawings/*.svg.

Each picture has a light panel of its own behind dark lines, so it is readable on light and dark pages alike. Timelines
show logs of the simulator.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lab.sched.rates import ClassTable
from lab.sched.replay import replay
from lab.sched.simulator import Simulator
from warpwell.scheduler.extend import Capacity, Core, Kind, Log, Request, Task
from warpwell.scheduler.report.timeline import residency_intervals
from warpwell.scheduler.task import Profile

FOLDER = Path(__file__).parent / "drawings"
INK, SOFT, PANEL = "#1f2937", "#6b7280", "#f8fafc"
BLUE, GREEN, AMBER, RED = "#dbeafe", "#dcfce7", "#fef3c7", "#fee2e2"


class Drawing:
    """Shapes of one picture, in a panel of `width` x `height`."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self.shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        label: str,
        *,
        anchor: str = "middle",
        size: int = 14,
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """Write one line around (x, y)."""
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{color}"{weight}>'
            f"{escape(label)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, labels: Sequence[str] = (), *, fill: str = BLUE
    ) -> None:
        """Draw a box with labels below one another in its middle, the first one bold."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{INK}"/>'
        )
        top = y + height / 2 + 5 - 9 * (len(labels) - 1)
        for k, label in enumerate(labels):
            self.text(x + width / 2, top + 18 * k, label, bold=k == 0)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, dashed: bool = False) -> None:
        """Draw an arrow from (x0, y0) to (x1, y1)."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{INK}" stroke-width="1.5"{dash} '
            'marker-end="url(#head)"/>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draw a thin line."""
        self.shapes.append(f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{SOFT}" stroke-width="1"/>')

    def svg(self) -> str:
        """Return the picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.description)}</desc>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PANEL}"/>',
                *self.shapes,
                "</svg>",
                "",
            ]
        )


def miss() -> Drawing:
    """A read whose page is not in the cache, step by step between four places."""
    picture = Drawing(
        860,
        600,
        "A miss",
        "Eight steps between device memory, pinned host memory, a service thread and storage: the reading thread takes "
        "a frame, puts a command into the submission queue, a service thread reads the page into a staging buffer and "
        "posts a completion, and the reading thread copies the page into its frame.",
    )
    columns = {
        "device": (115, "kernel and cache", "device memory", BLUE),
        "host": (345, "queues and staging", "pinned host memory", GREEN),
        "service": (560, "controller", "service threads", AMBER),
        "storage": (755, "medium", "SSD or file", RED),
    }
    for x, name, where, fill in columns.values():
        picture.box(x - 88, 18, 176, 48, [name, where], fill=fill)
        picture.line(x, 66, x, 535)
    device, host, service, storage = (column[0] for column in columns.values())

    def own(y: float, number: int, first: str, second: str = "") -> None:
        picture.box(device - 100, y - 16, 290, 40 if second else 30, fill="#ffffff")
        picture.text(device - 90, y + 4, f"{number}  {first}", anchor="start")
        if second:
            picture.text(device - 72, y + 19, second, anchor="start", size=12, color=SOFT)

    def send(y: float, number: int, label: str, x0: float, x1: float) -> None:
        picture.arrow(x0, y, x1, y)
        picture.text((x0 + x1) / 2, y - 8, f"{number}  {label}")

    own(100, 1, "a[i]: the page word is INVALID")
    own(152, 2, "take a frame and a command ID;", "one thread sets BUSY, the others wait")
    send(220, 3, "READ command, doorbell", device, host)
    send(265, 4, "take the command", host, service)
    send(310, 5, "read the page", service, storage)
    picture.arrow(storage, 355, host, 355)
    picture.text((storage + service) / 2, 347, "page to staging buffer")
    send(400, 6, "post the completion", service, host)
    send(445, 7, "copy page to the frame", host, device)
    own(490, 8, "set the word to VALID:", "every waiting thread reads its item")
    picture.text(
        device - 100,
        565,
        "A hit is step 1 alone: the word is VALID, and the thread reads the item from its frame.",
        anchor="start",
        size=13,
        color=SOFT,
    )
    return picture


def decision() -> Drawing:
    """The comparison that the scheduler makes when a kernel arrives."""
    picture = Drawing(
        860,
        430,
        "A decision of the scheduler",
        "A compute-bound kernel C arrives while memory-bound kernels A and B run. The policy compares the work that "
        "the device does with and without a change, decides to preempt B, and the executor lets B leave at the end "
        "of its blocks before C starts.",
    )
    picture.box(20, 30, 170, 66, ["C is submitted", "compute-bound", "waits"], fill=AMBER)
    picture.box(20, 130, 170, 66, ["A and B run", "both memory-bound", "S0 = 1.10"], fill=RED)
    picture.arrow(190, 63, 250, 100)
    picture.arrow(190, 163, 250, 126)
    picture.box(255, 70, 130, 86, ["View", "tasks, free room,", "measured rates"], fill=BLUE)
    picture.arrow(385, 113, 430, 113)
    picture.box(435, 30, 405, 166, fill="#ffffff")
    picture.text(450, 55, "The policy compares, over the next T = 20 ms:", anchor="start", bold=True)
    picture.text(450, 84, "stay", anchor="start")
    picture.text(515, 84, "S0 T = 1.10 x 20 = 22.0 ms of work", anchor="start")
    picture.text(450, 110, "change", anchor="start")
    picture.text(515, 110, "d n C + S1 (T - C)", anchor="start")
    picture.text(515, 132, "= 0.55 x 5 + 1.60 x 15 = 26.8 ms of work", anchor="start")
    picture.text(450, 162, "C = 5 ms is the time of the change; S1 = 1.60 is the", anchor="start", size=12, color=SOFT)
    picture.text(450, 180, "sum of A and C; d n = 0.55 is the rate of A meanwhile", anchor="start", size=12, color=SOFT)
    picture.arrow(560, 196, 560, 228)
    picture.text(578, 217, "26.8 > 22.0: preempt B, launch C", anchor="start", bold=True)

    left, right, top = 90, 830, 250
    picture.text(left - 20, top + 27, "A", bold=True)
    picture.text(left - 20, top + 71, "B", bold=True)
    picture.text(left - 20, top + 115, "C", bold=True)
    begin, leave = 300, 440
    picture.box(left, top, right - left, 36, ["A keeps running, block after block"], fill=RED)
    picture.box(left, top + 44, begin - left, 36, ["B runs"], fill=RED)
    picture.box(begin, top + 44, leave - begin, 36, ["last blocks end"], fill="#ffffff")
    picture.box(leave, top + 88, right - leave, 36, ["C runs with A; B continues later"], fill=AMBER)
    picture.arrow(begin, top + 150, begin, top + 84, dashed=True)
    picture.text(begin, top + 166, "B must leave", size=12, color=SOFT)
    picture.arrow(leave, top + 150, leave, top + 128, dashed=True)
    picture.text(leave + 8, top + 166, "B has left, C is launched", size=12, color=SOFT)
    return picture


def transfer() -> Drawing:
    """A copy to a device elsewhere, in chunks through staging buffers."""
    picture = Drawing(
        860,
        400,
        "A pool transfer",
        "An array goes from the application over the link into four staging buffers of the agent, and from there to "
        "the device. While chunk 2 is received, chunk 1 is copied on, so that both stages work at the same time.",
    )
    picture.box(20, 26, 150, 60, ["application", "array"], fill=GREEN)
    picture.arrow(170, 56, 330, 56)
    picture.text(250, 46, "link")
    picture.text(250, 76, "memory or network", size=12, color=SOFT)
    picture.box(335, 14, 250, 84, fill="#ffffff")
    picture.text(460, 34, "agent: pinned host memory", bold=True)
    for k in range(4):
        picture.box(350 + 57 * k, 46, 50, 36, ["2 MiB"], fill=BLUE)
    picture.arrow(585, 56, 705, 56)
    picture.text(645, 46, "copy engine")
    picture.box(710, 26, 130, 60, ["device", "buffer"], fill=AMBER)

    left, step, top = 130, 78, 140
    picture.text(20, top + 24, "link", anchor="start", bold=True)
    picture.text(20, top + 72, "copy engine", anchor="start", bold=True)
    for k in range(8):
        picture.box(left + step * k, top, step - 4, 36, [str(k + 1)], fill=BLUE)
        picture.box(left + step * (k + 1), top + 48, step - 4, 36, [str(k + 1)], fill=AMBER)
    picture.arrow(left, top + 106, 845, top + 106)
    picture.text(left, top + 124, "time", anchor="start", size=12, color=SOFT)
    picture.text(
        left + 60,
        top + 124,
        "chunk 2 is received while chunk 1 is copied on: 9 steps instead of 16",
        anchor="start",
        size=12,
        color=SOFT,
    )

    y = 305
    picture.text(20, y, "Other paths, if both ends allow it:", anchor="start", bold=True)
    for k, label in enumerate(
        (
            "an array below 24 MiB: one part, because handing a chunk over costs tens of microseconds",
            "an array of ww.pinned_empty on the same host: the copy engine reads it in place; nothing is sent",
            "two devices of one host: from memory to memory, by NVLink, PCIe or the operating system",
        )
    ):
        picture.text(36, y + 24 + 22 * k, f"•  {label}", anchor="start", size=13)
    return picture


WAVES = 40
"""Of each kernel in the simulator: a preempted kernel leaves after the wave that runs."""


def kernel(name: str, tenant: str, milliseconds: float, kind: Kind = Kind.COMPUTE, priority: int = 0) -> Task:
    """Return a kernel for the simulator."""
    profile = Profile(kind=kind, seconds=1e-3 * milliseconds, resident=264)
    return Task(name, 264 * WAVES, profile, tenant=tenant, priority=priority)


def simulated(submissions: Sequence[tuple[float, Task]], tenants: Mapping[str, Any] | None = None) -> Log:
    """Return the log of kernels that are submitted at times in milliseconds, under the default policy."""
    executor = Simulator(ClassTable(Capacity()), Capacity(), mode="drain")
    core = Core(executor, "lanes", tenants=tenants)
    replay([Request(task.name, [task], 1e-3 * time) for time, task in submissions], core)
    return core.log


def timeline(title: str, caption: str, log: Log, end: float, kinds: Mapping[str, Kind] | None = None) -> Drawing:
    """A row for each tenant, with its kernels until a time in milliseconds.

    A kernel waits on the device for earlier ones of its kind: `kinds` has the kinds of kernels that are not
    compute-intensive.
    """
    intervals = [interval for interval in residency_intervals(log) if 1e3 * interval.start < end]
    rows = list(dict.fromkeys(event.tenant for event in log))
    left, right, top, height = 110, 840, 62, 54
    bottom = top + height * len(rows)
    picture = Drawing(860, bottom + 46, title, caption)
    picture.text(20, 30, caption, anchor="start", bold=True)

    def at(seconds: float) -> float:
        return left + (right - left) * min(1.0, 1e3 * seconds / end)

    for row, (tenant, fill) in enumerate(zip(rows, (BLUE, AMBER), strict=True)):
        picture.text(20, top + height * row + 24, tenant, anchor="start", bold=True)
        for event in log:
            if event.tenant == tenant and event.kind == "arrive" and 1e3 * event.time < end:
                picture.text(at(event.time), top + height * row - 1, "▾", size=12)
        free = dict.fromkeys(Kind, 0.0)
        for interval in intervals:
            kind = (kinds or {}).get(interval.name, Kind.COMPUTE)
            begin, free[kind] = max(interval.start, free[kind]), interval.end
            if interval.tenant == tenant and 1e3 * begin < end:
                width = at(interval.end) - at(begin)
                label = [interval.name] if width > 10 * len(interval.name) else []
                picture.box(at(begin), top + height * row + 2, width, 34, label, fill=fill)
    picture.arrow(left, bottom + 4, right, bottom + 4)
    step = end / 6
    for k in range(6):
        picture.text(at(1e-3 * k * step), bottom + 22, f"{k * step:g}", size=12, color=SOFT)
    picture.text(right, bottom + 22, "ms", anchor="end", size=12, color=SOFT)
    picture.text(20, bottom + 36, "▾ submitted", anchor="start", size=12, color=SOFT)
    return picture


def notebooks() -> Drawing:
    """Two people whose kernels use different parts of the device, and then the same part."""
    cells = [
        (0, kernel("simulate", "anna", 24)),
        (5, kernel("filter", "ben", 10, Kind.MEMORY)),
        (27, kernel("simulate", "anna", 14)),
        (30, kernel("fit", "ben", 12)),
    ]
    caption = "Kernels that use different parts of the GPU run together, others one after another"
    return timeline("Two notebooks", caption, simulated(cells), 60, {"filter": Kind.MEMORY})


def inference() -> Drawing:
    """Training steps that leave for answers of higher priority."""
    steps = [(20 * k, kernel("step", "training", 20)) for k in range(3)]
    answers = [(time, kernel("answer", "inference", 3, priority=1)) for time in (8, 14, 38)]
    caption = "A training step leaves after some of its blocks, and continues after the answer"
    return timeline("Training beside inference", caption, simulated(steps + answers), 60)


def users() -> Drawing:
    """Tenants with weights 3 and 1."""
    submissions = [
        (0, kernel(name, tenant, 10)) for tenant, name in (("vision", "v"), ("speech", "s")) for _ in range(40)
    ]
    caption = "With weights 3 and 1, vision has three parts of the GPU's time, and speech has one"
    log = simulated(submissions, {"vision": {"weight": 3}, "speech": {"weight": 1}})
    return timeline("Two tenants", caption, log, 240)


PICTURES = {
    "miss": miss,
    "decision": decision,
    "transfer": transfer,
    "notebooks": notebooks,
    "inference": inference,
    "users": users,
}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
