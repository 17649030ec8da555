"""Logs as sentences, figures, pictures and metrics."""
