"""DynamoDB Streams as a source of records: the changes of the items of a table."""
