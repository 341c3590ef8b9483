"""Parts that several commands share, such as durations as options and tables as plain text."""
