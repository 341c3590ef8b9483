"""Event Hubs as a source: the `azure-eventhub` client reads, and the leases determine which worker reads what."""
