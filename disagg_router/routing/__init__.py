"""One request, top to bottom."""
