"""The whole of it on one machine: services, a producer, workers, and what befalls them."""
