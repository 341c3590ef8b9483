"""Parses the answers of Kinesis by compiled libraries in place of boto3's parser; all the rest stays boto3's."""
