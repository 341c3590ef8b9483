"""Fleets of real workers under virtual time, with every fault that a seed can choose."""
