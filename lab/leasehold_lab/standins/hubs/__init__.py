"""Event hubs on this machine: the AMQP stand-in, for which the engine of python-qpid-proton must be there."""
