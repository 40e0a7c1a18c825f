"""The database: tables, all SQL, and the one place that commits."""
