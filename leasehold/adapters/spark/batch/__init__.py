"""A slice of a stream as a batch of Spark, read without leases by tasks that open the stream themselves."""
