"""Moves checkpoints: between stores, back and forward."""
