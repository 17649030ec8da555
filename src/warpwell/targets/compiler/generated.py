"""The module that launch code generated for a kernel belongs to; code in the on-disk cache finds it by name."""
