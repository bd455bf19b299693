"""The outer loop of a fit.

May know graph and everything below it; no jobs, no estimator.
"""
