"""The `interp` target: device code as plain Python under a seeded scheduler and weak memory."""
