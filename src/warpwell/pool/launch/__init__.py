"""Starts the processes of a pool, watches them, and clears up."""
