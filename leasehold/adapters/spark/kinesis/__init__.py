"""The Spark data sources `kinesis-leased` for Kinesis streams and `dynamodb-leased` for changes of DynamoDB tables."""
