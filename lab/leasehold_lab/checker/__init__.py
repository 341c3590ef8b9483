"""Model-checks small fleets, by exploring all possible orders of events with the real function `plan`."""
