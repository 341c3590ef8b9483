"""Contains the rule sets, and the code that they share."""
