"""`leadout selftest`: whether Leadout works on this machine, with this pair and these flags."""
