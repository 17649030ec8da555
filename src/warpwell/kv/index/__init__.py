"""Where records lie, and how they are read."""
