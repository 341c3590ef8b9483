"""Layout `sessions`: a row for each lease, which changes with its owner, and a row for each process with the rest.

`specs/sessions.md` has the rules (G1, G2, …) and the reason for each.
"""
