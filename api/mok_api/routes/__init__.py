"""The routes. A route parses, calls one use case, and returns."""
