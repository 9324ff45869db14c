"""Continual learning: adapt a drafter to its traffic, test that it is better, and publish it."""
