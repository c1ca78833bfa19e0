"""HTTP in, bytes out."""
