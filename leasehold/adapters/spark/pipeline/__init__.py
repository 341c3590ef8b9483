"""The `leasehold pipeline` application: a leased stream landed as Parquet and added up in windows."""
