"""Every interleaving of a small fleet, checked over the real `plan`."""
