"""Amazon ECS: the tasks on a host."""
