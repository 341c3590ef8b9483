"""Tools for the operator of a lease table: explanations, forecasts, live pages, checkpoints moved by hand."""
