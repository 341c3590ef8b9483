"""The commands that the laboratory adds to the command line: `demo`, `dev`, `simulate` and `what-if`."""
