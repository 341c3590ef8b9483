"""A small read-only page on lease tables, live, with what monitoring reads of it."""
