"""Stand-ins for the cloud's services, started on this machine for the demo and the tests."""
