"""A Linux guest: `boot` starts it, `program` runs in it."""
