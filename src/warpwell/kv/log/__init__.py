"""The log on disk: segments, journal, recovery, compaction."""
