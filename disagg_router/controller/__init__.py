"""Launches vLLM instances on Ray and keeps them running."""
