"""The product's bench with one more target; `make bench` runs it."""
