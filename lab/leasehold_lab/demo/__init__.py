"""The demo, on one machine: services, a producer, workers, and the faults that they survive."""
