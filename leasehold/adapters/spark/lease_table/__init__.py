"""A lease table as a Spark data source."""
