"""A demo that runs local services, a producer and workers on one machine, and shows how the fleet survives faults."""
