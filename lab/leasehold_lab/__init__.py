"""The laboratory of leasehold: tools that test it, and tools to develop with. `leasehold` imports none of it."""
