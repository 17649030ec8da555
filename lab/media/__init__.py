"""Storage media for studies and tests: emulated drives and injected faults.

- latency.py  `Latency`, `KeyValueLatency`: an emulated drive over a medium or over a key-value shard; known drives
- faulty.py   `Faulty`, `KeyValueFaulty`: injected faults
- gated.py    `GatedMedium`: commands complete when a test lets them
"""

from .faulty import Faulty, KeyValueFaulty
from .latency import DRIVES, DriveRates, KeyValueLatency, Latency, rates_of

__all__ = ["DRIVES", "DriveRates", "Faulty", "KeyValueFaulty", "KeyValueLatency", "Latency", "rates_of"]
