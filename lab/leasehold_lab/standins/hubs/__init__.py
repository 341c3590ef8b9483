"""Event hubs on this machine: an AMQP stand-in, which needs the engine of python-qpid-proton."""
