"""A small, live, read-only web page on lease tables, with metrics and health checks."""
