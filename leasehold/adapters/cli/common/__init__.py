"""Helpers that several commands share, such as common options, printed tables and the handling of signals."""
