"""Losses, advantages and returns: pure functions of arrays that depend on JAX alone.

An argument of the wrong type raises a TypeError that names it: integers for floats, or numbers for a bool mask.
"""
