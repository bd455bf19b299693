"""The demo: everything once, on two photographs.

May know everything but the command line.
"""
