"""Event Hubs as a source: the `azure-eventhub` client reads, and the leases say who reads what."""
