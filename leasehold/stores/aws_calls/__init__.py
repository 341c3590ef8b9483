"""Calls of AWS's services on a short way of their own, beside boto3, which judges whatever is not a plain answer."""
