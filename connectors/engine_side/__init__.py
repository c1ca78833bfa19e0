"""Runs inside an engine, found by PYTHONPATH; nothing else in the project imports it."""
