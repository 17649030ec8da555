"""Times alone, as a log of the scheduler has them."""


def alone_times(events):
    """Return number and seconds of each task of a log that had the whole device for itself from its launch to its end.

    The seconds are the kernel's own, as the executor measured them: without compiling, and without copies.
    """
    return [(event.task, event.why["alone"]) for event in events if event.kind == "end" and "alone" in event.why]
