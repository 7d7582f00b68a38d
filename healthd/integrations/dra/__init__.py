"""Dynamic resource allocation (DRA): a taint on one device, where that is all that is wrong with a node."""
