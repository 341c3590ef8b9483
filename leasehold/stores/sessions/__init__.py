"""Layout `sessions`: a row for each lease, which changes with its owner, and one for each process, which says the rest.

`specs/sessions.md` has the rules, each with its number and what is lost without it.
"""
