"""Spans of what a worker does, told to OpenTelemetry where a program has configured it."""
