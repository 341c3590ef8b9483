"""The commands by which operators inspect and change a group of workers."""
