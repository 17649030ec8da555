"""Reports from a scheduler's log.

Each module reads the events of a log::

    explain.py      sentences: the reason for each decision, with its numbers
    prometheus.py   LogMetrics: counters, gauges and histograms, in Prometheus' text format
    timeline.py     residency intervals of tasks, as a Chrome trace
"""
