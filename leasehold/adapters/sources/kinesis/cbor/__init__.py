"""Parses the responses of Kinesis with compiled libraries. Everything else is left to boto3."""
