"""A simulated fleet under the product's own router, in virtual time."""
