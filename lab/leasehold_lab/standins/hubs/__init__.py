"""A local stand-in for Event Hubs over AMQP. It needs the engine of python-qpid-proton."""
