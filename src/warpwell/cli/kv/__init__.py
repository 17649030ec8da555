"""`warpwell kv`."""
