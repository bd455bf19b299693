"""What everything else may use: modules that load late, text without credentials or control characters."""
