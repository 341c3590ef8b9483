"""The proofs of the rules and the worker: a simulator under virtual time, and a checker of every interleaving."""
