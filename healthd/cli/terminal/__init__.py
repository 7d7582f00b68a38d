"""What people see: output, tables, progress."""
