"""Loads, files and disks of the crash campaign (`kv_crash`): each module describes its part."""
