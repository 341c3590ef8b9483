"""The rule sets and the code that they share."""
