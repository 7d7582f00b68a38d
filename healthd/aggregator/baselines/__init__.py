"""What is learned of the fleet: limits from healthy nodes, and who is slow among its peers."""
