"""Closed forms, in plain Python, each with its source. Import the module you need."""
