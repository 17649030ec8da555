"""The page cache: page words, frames, eviction, statistics."""

from .cache import Cache
from .plan import Space
from .sizes import format_size, parse_size
from .statistics import Statistics

__all__ = ["Cache", "Space", "Statistics", "format_size", "parse_size"]
