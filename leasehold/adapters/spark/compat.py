"""Provides the parts of PySpark's data source API that its older versions lack.

Each part is looked for by itself: a vendor's Spark may have a part that Spark's own release of that number has not.

part                      since   without it
read limits               4.2     our options alone limit a batch
`latestOffset(start, …)`  4.2     Spark calls `latestOffset()`; the reader follows which batch was planned last
availableNow              4.2     the source is not told of the trigger, and the query plans one batch in a run
Arrow for a stream sink   4.1     Spark gives Arrow to any `DataSourceArrowWriter`, so the writer is one, too
filters of a batch        4.1     Spark filters by itself
"""

from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter, EqualTo, Filter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    TELLS_AVAILABLE_NOW = True
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxBytes,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )

        TELLS_AVAILABLE_NOW = True
    except ImportError:
        from attrs import frozen

        TELLS_AVAILABLE_NOW = False

        class ReadLimit:
            """Limits a batch."""

        @frozen
        class ReadAllAvailable(ReadLimit):
            """No limit."""

        @frozen
        class ReadMaxRows(ReadLimit):
            """At most so many rows."""

            max_rows: int

        @frozen
        class ReadMaxBytes(ReadLimit):
            """At most so many bytes."""

            max_bytes: int

        class SupportsTriggerAvailableNow:
            """Marks a reader that can be told to end with what is there now."""

    try:
        from pyspark.sql.datasource import DataSourceStreamArrowWriter
    except ImportError:

        class DataSourceStreamArrowWriter(datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter):
            """A writer of a query that gets record batches."""

    # Named in annotations, and compared with filters that only a later Spark pushes down.
    Filter = getattr(datasource, "Filter", Any)
    EqualTo = getattr(datasource, "EqualTo", ())

__all__ = [
    "TELLS_AVAILABLE_NOW",
    "DataSourceStreamArrowWriter",
    "EqualTo",
    "Filter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
