"""Parses the responses of Kinesis with compiled libraries instead of boto3; everything else is left to boto3."""
