"""The outer loop of a fit.

May import graph and the layers below it; not jobs or the estimator.
"""
