"""Six questions about long taxi trips: each question reads one more column of the few matching rows.

Run it with ``python taxi.py``, which generates trips, or with months of New York's trip records in Parquet:
``python taxi.py green_tripdata_2023-01.parquet ...``. It needs the extra ``table`` (pyarrow and Polars).
"""

import math
import sys
import tempfile
from pathlib import Path

try:
    import polars as pl
    import pyarrow as pa
except ImportError:
    sys.exit("this example needs pyarrow and Polars: pip install 'warpwell[table]', or in a checkout -e '.[table]'")
import numpy as np

import warpwell as ww

COLUMNS = ["trip_distance", "total_amount", "extra", "tip_amount", "tolls_amount", "mta_tax"]
LONG = 30.0  # miles


def generated_trips(rows):
    """Return generated trips, of which few are long."""
    random = np.random.default_rng(0)
    miles = np.round(random.lognormal(0.6, 0.85, rows), 2)
    fare = 3 + 2.5 * miles
    dollars = [random.choice([0.0, 0.5, 1.0, 2.5], rows), fare * 0.15, random.choice([0.0, 6.94], rows)]
    return pa.table([miles, fare + sum(dollars), *dollars, np.full(rows, 0.5)], names=COLUMNS)


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trips.ww"
        source = sys.argv[1:] or generated_trips(300_000)
        ww.table.convert(source, path, columns=COLUMNS, codes=["mta_tax"]).close()

        # by Polars: it evaluates the predicate on the column in place, and reads other columns where the predicate is
        # true
        trips = ww.table.scan(path)
        by_polars = trips.filter(pl.col("trip_distance") >= LONG).select(pl.col(COLUMNS).mean()).collect()

        # the same by filters, without Polars; each question reads one more column of the same rows
        with ww.table.open(path) as table:
            rows = table.where([("trip_distance", ">=", LONG)])
            print(f"{len(rows):,} of {len(table):,} trips have {LONG:g} miles or more")
            for count in range(1, len(COLUMNS) + 1):
                name = COLUMNS[count - 1]
                values = rows.take(name).numpy()[name]
                values = values[~np.isnan(values)]  # a null is NaN there
                mean = math.fsum(values) / len(values)
                read = sum(column.read for column in rows.explain(COLUMNS[:count]))
                print(f"Q{count - 1}: mean of {name:13} {mean:9.4f}; {count} columns of these rows: {read:,} bytes")
                assert math.isclose(mean, by_polars[name][0], rel_tol=1e-12)
            column_bytes = sum(extent.nbytes for name in COLUMNS for run in table[name].runs for extent in run.extents)
            assert read <= column_bytes + 2 * 4096 * len(COLUMNS)
            print(f"whole columns have {column_bytes:,} bytes")


if __name__ == "__main__":
    main()
