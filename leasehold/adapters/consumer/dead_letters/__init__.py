"""Stores dead letters, which are records whose handler kept failing, and replays them."""
