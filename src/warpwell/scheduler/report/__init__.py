"""A scheduler's log in other forms.

Each module reads the events of a log::

    explain.py      sentences: why each decision was taken, with its figures
    prometheus.py   LogMetrics: counters, gauges and histograms, in Prometheus' text format
    timeline.py     when each task was on the device, as a Chrome trace
"""
