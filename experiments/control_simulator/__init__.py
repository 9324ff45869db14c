"""A simulator for the draft-length policy: synthetic traffic on modelled machines."""
