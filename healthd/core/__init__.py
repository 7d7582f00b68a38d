"""What every room may use: records, settings, errors, the wire, supervised tasks."""
