"""Kill jobs and compare what they give when they are run again: at each write (`sweep`) or at any moment."""
