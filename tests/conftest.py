"""Fixtures that every test may ask for."""
import signal

from tests.databases import clock, db, empty_url, kind, migrated_database, migrated_file, postgresql, url  # noqa: F401

# A shell starts a background command with SIGINT ignored, and its children inherit that: the commands that tests interrupt
# must hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)
