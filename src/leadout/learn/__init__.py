"""Keeping a drafter up with its traffic: adapt it, prove it better, publish it."""
