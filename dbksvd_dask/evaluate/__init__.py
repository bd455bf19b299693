"""Measurements of a dictionary and its codes: arrays in, numbers out."""
