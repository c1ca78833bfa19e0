"""Metrics and the request log."""
