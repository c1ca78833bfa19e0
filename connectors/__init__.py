"""How KV moves from a prefill to a decode instance: one file per connector."""
