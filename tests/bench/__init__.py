"""Timings against a plain local ipykernel in the same run; `make bench` runs them."""
