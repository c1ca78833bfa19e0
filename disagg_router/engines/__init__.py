"""The only package that talks HTTP to vLLM."""
