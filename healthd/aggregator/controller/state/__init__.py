"""What the engine remembers of what is on disk, by subject."""
