"""Formats whose shards are polled as those of Kinesis: `kinesis-leased`, and `dynamodb-leased`, a table's changes."""
