"""What a kernel in a microVM costs, next to a plain local ipykernel measured in the same run.

Layer 6. `cantelop bench` (`cli.bench`) measures the product; `tests/bench` runs the same measures
with one more target, which the product cannot choose. From the bottom up: `host` processes, memory
and CPU · `figures` rows, ratios and the JSON · `measures` one kernel · `service` a daemon of the
bench's own · `targets` what is compared · `suite` the whole run · `report` and `chart`.
"""
