"""Pages over the whole fleet beside the grid: the heat map of a measurement, the events, actions on several nodes."""
