"""Stores leases in layout `sessions`, where one write of a worker renews and checkpoints all its leases.

Each lease has a row that changes only when its owner changes. Each process has a session row with all data that change
more often. `specs/sessions.md` contains the rules (G1, G2, …) and their reasons.
"""
