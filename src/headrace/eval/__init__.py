"""Judging a model's answers, and whether two configurations differ. No torch."""
