"""The paper's experiments: one module each, with `add_arguments(parser)` and `run(args)`."""
