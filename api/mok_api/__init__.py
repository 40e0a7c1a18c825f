"""The REST API and the web page. It never imports training, kernels, torch or Ray; it meets the workers in the database."""

from mok_api.app import create_app

__all__ = ["create_app"]
