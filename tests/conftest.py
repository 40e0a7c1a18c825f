"""Fixtures that every test may ask for."""
from tests.databases import clock, db, empty_url, kind, migrated_database, migrated_file, postgresql, url  # noqa: F401
