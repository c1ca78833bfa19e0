"""Who serves a request, and by which path: one file per policy."""
