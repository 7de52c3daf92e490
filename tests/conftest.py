"""Every test runs in float64 with strict promotion, and a warning is a failure."""

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
