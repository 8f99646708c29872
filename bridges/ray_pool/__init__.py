"""Judges in actors of a Ray cluster."""
