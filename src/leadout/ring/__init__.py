"""A ring in shared memory through which a server hands served texts and their states to a learner.

- `memory`: one ring file, one writer, any number of readers
- `records`: what is in a ring, packed into bytes and back
- `folder`: the folder that servers and learners share
- `sequences`: the reader that joins records into whole sequences
- `channel`: an encrypted connection between two holders of a key
- `relay`: the sequences of a ring on other hosts
"""
