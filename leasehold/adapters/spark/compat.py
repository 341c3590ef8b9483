"""Provides the parts of PySpark's data source API that older versions lack.

Each part is detected separately, because a vendor's Spark may have features that Apache Spark of the same version
lacks.

part                      since   in older versions
read limits               4.2     only our options limit a batch
`latestOffset(start, …)`  4.2     Spark calls `latestOffset()`; the reader tracks which batch was planned last
availableNow              4.2     the source is not notified of the trigger, and the query plans one batch in a run
Arrow for a stream sink   4.1     Spark passes Arrow to any `DataSourceArrowWriter`, so the writer is also one of those
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

    HAS_AVAILABLE_NOW = True
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxBytes,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )

        HAS_AVAILABLE_NOW = True
    except ImportError:
        from attrs import frozen

        HAS_AVAILABLE_NOW = False

        class ReadLimit:
            """A limit on a batch."""

        @frozen
        class ReadAllAvailable(ReadLimit):
            """No limit."""

        @frozen
        class ReadMaxRows(ReadLimit):
            """At most `max_rows` rows."""

            max_rows: int

        @frozen
        class ReadMaxBytes(ReadLimit):
            """At most `max_bytes` bytes."""

            max_bytes: int

        class SupportsTriggerAvailableNow:
            """Marks a reader that can stop at the data available when its run began."""

    try:
        from pyspark.sql.datasource import DataSourceStreamArrowWriter
    except ImportError:

        class DataSourceStreamArrowWriter(datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter):
            """The writer of a query, which receives record batches."""

    # `Filter` and `EqualTo` are used in annotations, and to recognize the filters that Spark passes. Only Spark 4.1 and
    # later pass filters.
    Filter = getattr(datasource, "Filter", Any)
    EqualTo = getattr(datasource, "EqualTo", ())

__all__ = [
    "HAS_AVAILABLE_NOW",
    "DataSourceStreamArrowWriter",
    "EqualTo",
    "Filter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
