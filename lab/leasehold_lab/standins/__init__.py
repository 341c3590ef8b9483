"""Stand-ins for cloud services, started on this machine for the demo and the tests."""
