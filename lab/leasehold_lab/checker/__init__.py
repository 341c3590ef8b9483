"""Checks every interleaving of the events in a small fleet, with the real `plan`."""
