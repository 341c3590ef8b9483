"""Formats whose shards are polled as Kinesis shards are: `kinesis-leased`, and `dynamodb-leased` for table changes."""
