"""Grammars: what a request may ask of the text, checked and compiled for a tokenizer. No torch."""
