"""Simulates fleets of real workers under virtual time, with random faults that a seed determines."""
