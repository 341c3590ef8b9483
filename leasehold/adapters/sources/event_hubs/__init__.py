"""A source for Event Hubs: the `azure-eventhub` client reads events, and leases decide which worker reads what."""
