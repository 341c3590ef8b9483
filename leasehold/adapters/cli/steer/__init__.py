"""The commands by which an operator sees a group and steers it."""
