"""How right the gate is: what it decided, held against how the jobs ended."""
