"""Parts that several commands share: times as users write them, and tables as plain text."""
