"""All settings in one tree, and where a command gets them from."""
