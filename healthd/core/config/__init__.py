"""Settings from a file, variables and arguments, by one rule for any dataclass."""
