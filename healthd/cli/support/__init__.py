"""The commands for support: `doctor`, `bundle`, `record`."""
