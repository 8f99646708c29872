"""Losses, advantages and their kin: pure functions of arrays, on JAX alone.

An argument of another type than a docstring says (integers where numbers are read, numbers where a mask is) raises a
TypeError that names it.
"""
