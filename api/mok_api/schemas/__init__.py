"""What requests and answers look like, for the OpenAPI description and for reading small bodies; by groups of routes.

Answers are made by the use cases' own `as_dict`, not by these models; a test holds every answer against its model.
"""
