"""Records aggregated as the Kinesis Producer Library aggregates them, read and written."""
