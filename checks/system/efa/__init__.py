"""EFA interfaces: their number and their links."""
