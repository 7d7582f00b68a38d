"""Orders of the aggregator: runs, leases, and the ranks of validations."""
