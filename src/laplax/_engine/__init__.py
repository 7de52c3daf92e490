"""The engine room: how work is cut, looped over, decomposed and remembered.

Everything that knows the machine is here, and nothing that knows statistics. Files are imported by
name: `chunks` (the planner), `loops` (a sum over data, a map over a batch), `shards` (examples that
are divided among devices), `samples` (examples picked out of a data set), `linalg`, `lanczos` and
`lanczos_large` (decompositions that choose where they run), `products` (sums that XLA needs help
with), `memo` (what is remembered, and how long), `arrays` (values that can be looked at),
`versions` (what differs between releases of JAX).
"""
