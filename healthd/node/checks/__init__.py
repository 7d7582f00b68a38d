"""Which checks run when: the catalogue, the schedule, passive rounds and active runs."""
