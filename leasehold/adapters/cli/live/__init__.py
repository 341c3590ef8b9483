"""The live view of a table, steered by keys."""
