"""Lease tables in DynamoDB, in the layout of the Kinesis Client Library."""
