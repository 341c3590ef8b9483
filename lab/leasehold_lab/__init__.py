"""Tools to test leasehold and to develop with it. The package `leasehold` does not depend on this one."""
