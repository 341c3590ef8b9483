"""Records the history of a run, and checks from the history alone whether the run kept the laws."""
