"""What no library can be much below: bare JAX for a part of the same mathematics."""

import jax
import jax.numpy as jnp
import networks


class Floors:
    """A problem, and bare passes over it."""

    def __init__(self, problem):
        self.problem = problem
        self.fn = networks.NETWORKS[problem.kind]
        self.params = networks.as_params(problem)
        self.x, self.y = jnp.asarray(problem.x), jnp.asarray(problem.y)
        self.x_new = jnp.asarray(problem.x_new)

    def _outputs(self, params, x):
        return jax.vmap(self.fn, (0, None))(x, params)

    def _loss(self, params, x, y):
        f = self._outputs(params, x)
        if self.problem.loss == "mse":
            return 0.5 * jnp.sum((f - y) ** 2)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(f), y[:, None], axis=1))

    def gradient(self):
        """One gradient of all data: in one call, and in calls of 250. The faster one counts."""
        gradient = jax.jit(jax.grad(self._loss))

        def parts():
            cuts = range(0, len(self.x), 250)
            return [gradient(self.params, self.x[i : i + 250], self.y[i : i + 250]) for i in cuts]

        return [lambda: gradient(self.params, self.x, self.y), parts]

    def gram(self):
        """J^T J of all data."""

        @jax.jit
        def gram(params, x):
            jacobian = jax.vmap(jax.jacrev(lambda p, x: self.fn(x, p)), (None, 0))(params, x)
            rows = [leaf.reshape(x.shape[0], -1) for leaf in jax.tree.leaves(jacobian)]
            rows = jnp.concatenate(rows, axis=1)
            return rows.T @ rows

        return lambda: gram(self.params, self.x)

    def product(self):
        """One product with the GGN of all data: in one call, and in calls of 250."""

        def hessian_product(f, v):
            if self.problem.loss == "mse":
                return v
            p = jax.nn.softmax(f)
            return p * v - p * jnp.vecdot(p, v)[:, None]

        @jax.jit
        def product(params, vector, x):
            f, pushed = jax.jvp(lambda p: self._outputs(p, x), (params,), (vector,))
            back = jax.vjp(lambda p: self._outputs(p, x), params)[1]
            return back(hessian_product(f, pushed))[0]

        def parts():
            cuts = range(0, len(self.x), 250)
            return [product(self.params, self.params, self.x[i : i + 250]) for i in cuts]

        return [lambda: product(self.params, self.params, self.x), parts]

    def forward(self):
        """30 forward passes at 1,000 points with weights of their own."""

        @jax.jit
        def passes(params, x):
            return jax.lax.map(lambda p: self._outputs(p, x), params)

        many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 30), self.params)
        return lambda: passes(many, self.x_new)
