"""Code that several commands share, such as options for durations, and tables as plain text."""
