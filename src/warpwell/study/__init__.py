"""Traces, workloads and simulation: what compares, and no program needs."""
