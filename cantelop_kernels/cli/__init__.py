"""The command line, one module per sub-command.

Layer 6. Each has `add_parser(subparsers)`, which sets `func` to an `async def (args) -> int` whose
result is the exit code. They raise errors and never print them: `report` does, in one place.
"""
