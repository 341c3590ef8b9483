"""The commands of the command line that the laboratory brings: `demo`, `dev`, `simulate` and `what-if`."""
