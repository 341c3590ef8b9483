"""The rule sets, and what they share."""
