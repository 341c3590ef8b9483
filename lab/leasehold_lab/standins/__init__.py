"""Local stand-ins for cloud services, which the demo and the tests start on this machine."""
