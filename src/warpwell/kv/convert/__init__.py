"""Records from other formats, and to them."""
