"""Jobs of this node as they tell of themselves: the socket of their step reports, and what is shown of them."""
