"""Measurements for a machine with a GPU and nothing else: no network, no models, no installed package."""
