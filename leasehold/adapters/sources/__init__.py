"""The sources from which workers read records, all with the same interface."""
