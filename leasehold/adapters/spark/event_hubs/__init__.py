"""The Spark data source over Event Hubs, `eventhubs-leased`."""
