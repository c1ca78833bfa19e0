"""What a request costs: KV geometry and bytes."""
