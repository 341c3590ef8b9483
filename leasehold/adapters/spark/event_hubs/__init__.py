"""The Spark data source for Event Hubs, `eventhubs-leased`."""
