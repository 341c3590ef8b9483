"""Stores dead letters, which are records that no attempt could handle, and replays them."""
