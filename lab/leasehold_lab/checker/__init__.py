"""Checks all possible orders of events in small fleets, with the real `plan`."""
