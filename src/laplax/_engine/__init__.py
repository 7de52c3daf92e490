"""The engine room: how work is cut, looped over, decomposed and remembered.

Everything that knows the machine is here, and nothing that knows statistics. Each file stands for
itself and is imported by name: `chunks` (the planner), `loops` (a sum over data, a map over a
batch), `samples` (examples picked out of a data set), `linalg` and `lanczos` (decompositions that
choose where they run), `products` (sums that XLA needs help with), `memo` (what is remembered, and
how long), `arrays` (values that can be looked at), `versions` (what differs between releases of
JAX).
"""
