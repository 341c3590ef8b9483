"""An operator and a lease table: explanations, forecasts, live pages, checkpoints moved by hand."""
