"""How the database came to its shape: Alembic, run by `store` at start."""
