"""Fleets of real workers under virtual time, with any fault that a seed can choose."""
