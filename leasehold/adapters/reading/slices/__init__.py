"""A slice of a stream, from one time to another, read once by a group of its own that ends by itself."""
