"""Calls of AWS services that bypass boto3 and return to it for everything except plain responses."""
