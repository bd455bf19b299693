"""Restartable jobs: init, parts, finish.

May know graph, importers and stores; no fits, no estimator.
"""
