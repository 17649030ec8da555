"""``warpwell run -m warpwell.pool.launch.describe FILE``: writes the devices of its pool, for ``pool info``."""

from __future__ import annotations

import json
import sys
import time

from ..devices import devices

_ROUND_TRIPS = 20


def main(path: str) -> None:
    """Write a JSON list, an object for each device."""
    found = []
    for d in devices():
        times = []
        for _ in range(_ROUND_TRIPS):
            start = time.perf_counter()
            free, _total = d.memory_info()
            times.append(time.perf_counter() - start)
        properties = {name: getattr(d, name) for name in ("name", "host", "target", "uuid", "link")}
        properties |= {"device": d.index, "pid": d.process, "compute_capability": d.compute_capability}
        properties |= {"memory_bytes": d.memory, "free_bytes": free}
        found.append({**properties, "round_trip_us": round(sorted(times)[_ROUND_TRIPS // 2] * 1e6, 1)})
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(found, stream)


if __name__ == "__main__":
    main(sys.argv[1])
