"""`warpwell run` and `warpwell pool`."""
