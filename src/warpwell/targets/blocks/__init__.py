"""Launches whose blocks are claimed one by one and can be stopped between two of them."""
