"""One small program per claim; see benchmarks/README.md."""
