"""Calls AWS services without boto3, and falls back to boto3 for everything except plain responses."""
