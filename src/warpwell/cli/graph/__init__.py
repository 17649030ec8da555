"""`warpwell graph`."""
