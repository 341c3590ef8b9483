"""Model-checks small fleets by exploring every possible order of events, with the real function `plan`."""
