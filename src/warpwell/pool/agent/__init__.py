"""The process of one device, and the calls that it answers."""
