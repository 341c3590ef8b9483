"""The commands for operators, which show a group of workers and change it."""
