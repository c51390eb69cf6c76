"""Formats in which models write reasoning and tool calls: one a file. `port.py` says what a file must offer."""
