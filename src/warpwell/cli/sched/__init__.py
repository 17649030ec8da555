"""`warpwell sched`."""
