"""The commands that leasehold-lab adds to the command line: `demo`, `dev`, `simulate` and `what-if`."""
