"""Workers, sources and commands around the pure rules."""
