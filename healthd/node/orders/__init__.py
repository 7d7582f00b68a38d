"""What the aggregator wants of this node: orders, the leases it holds, and the ranks it gives to validations."""
