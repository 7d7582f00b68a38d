"""Tables, migrations and rows: the one place with SQL. It knows records, never logic."""
