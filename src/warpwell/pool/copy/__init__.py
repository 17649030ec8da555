"""Copies between the program, its devices, and two devices."""
