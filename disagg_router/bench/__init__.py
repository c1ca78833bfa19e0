"""Measurements by command: policies against one another on real engines, and the price of one decision."""
