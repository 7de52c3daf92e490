"""Which inputs of a jaxpr reach which of its outputs, as values or with a derivative.

Sets of inputs are the bits of a number: bit i stands for input i. What is not known for sure counts
as reached, so that an input outside of the set is one that the output does not depend on.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from ._engine import versions as core

# Operations whose derivative is zero everywhere.
BLIND = frozenset({"stop_gradient", "sign", "round", "floor", "ceil"})

# Not the calls with a derivative of their own (`custom_jvp`, `custom_vjp`): it would be lost.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def struct_of(atom: "core.Var | core.Literal") -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable that holds an array."""
    return cast(jax.ShapeDtypeStruct, atom.aval)


def opened(
    inner: "core.Jaxpr | core.ClosedJaxpr",
) -> "tuple[core.Jaxpr, Sequence[jax.Array]]":
    """A jaxpr and its constants, of one that is closed or not."""
    return (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())


def called(eqn: "core.JaxprEqn") -> "tuple[core.Jaxpr, Sequence[jax.Array]]":
    """The jaxpr of a call, and its constants."""
    return opened(eqn.params[CALLS[eqn.primitive.name]])


def reaches(jaxpr: "core.Jaxpr", derivatives: bool = False) -> tuple[int, ...]:
    """For every output of a jaxpr, the inputs that it may depend on.

    With `derivatives`, the inputs that it may have a derivative in.
    """
    known = {var: 1 << i for i, var in enumerate(jaxpr.invars)}

    def read(atom: "core.Var | core.Literal") -> int:
        if isinstance(atom, core.Literal) or (derivatives and not _is_inexact(atom)):
            return 0
        return known.get(atom, 0)

    for eqn in jaxpr.eqns:
        sources = [read(atom) for atom in eqn.invars]
        for var, bits in zip(eqn.outvars, reached_by(eqn, derivatives), strict=True):
            known[var] = _through(bits, sources)
        if eqn.effects:  # a reference may have been written to
            every = _union(sources)
            known.update((a, every) for a in eqn.invars if not isinstance(a, core.Literal))
    return tuple(read(atom) for atom in jaxpr.outvars)


def _is_inexact(variable: "core.Var") -> bool:
    """Whether a variable holds numbers that are not whole, and so can have a derivative."""
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is None or bool(jnp.issubdtype(dtype, jnp.inexact))


def reached_by(eqn: "core.JaxprEqn", derivatives: bool = False) -> tuple[int, ...]:
    """For every output of an equation, the operands that it may depend on."""
    name = eqn.primitive.name
    params = eqn.params
    if derivatives and name in BLIND:
        return (0,) * len(eqn.outvars)
    if name in CALLS:
        return reaches(called(eqn)[0], derivatives)
    if name == "cond":
        branches = [reaches(opened(branch)[0], derivatives) for branch in params["branches"]]
        return tuple(1 | _union(bits) << 1 for bits in zip(*branches, strict=True))
    if name == "scan":
        return _scan(eqn)
    if name == "while":
        return _while(eqn)
    return ((1 << len(eqn.invars)) - 1,) * len(eqn.outvars)


def passed_through(eqn: "core.JaxprEqn") -> dict[int, int]:
    """Outputs of a loop that are one of its operands, unchanged: output to operand."""
    if eqn.primitive.name == "scan":
        start = eqn.params["num_consts"]
        return {i: start + i for i in _unchanged(eqn.params["jaxpr"].jaxpr, start)}
    if eqn.primitive.name == "while":
        start = eqn.params["body_nconsts"]
        before = eqn.params["cond_nconsts"]
        body = eqn.params["body_jaxpr"].jaxpr
        return {i: before + start + i for i in _unchanged(body, start)}
    return {}


def unrolled_equations(scan: "core.JaxprEqn") -> int:
    """How many equations a `scan` has once it is unrolled; a turn counts, too."""
    return scan.params["length"] * (1 + num_equations(scan.params["jaxpr"].jaxpr))


def num_equations(jaxpr: "core.Jaxpr") -> int:
    """How many equations there are once every `scan` is unrolled."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            total += unrolled_equations(eqn)
        elif eqn.primitive.name in CALLS:
            total += num_equations(called(eqn)[0])
        else:
            total += 1
    return total


def _scan(eqn: "core.JaxprEqn") -> tuple[int, ...]:
    """Until nothing changes: what is carried depends on what it was made of in all turns before."""
    step = reaches(eqn.params["jaxpr"].jaxpr)
    start = eqn.params["num_consts"]
    count = eqn.params["num_carry"]
    sources = [1 << i for i in range(len(eqn.invars))]
    while True:
        carried = [sources[start + i] | _through(step[i], sources) for i in range(count)]
        if carried == sources[start : start + count]:
            return (*carried, *(_through(bits, sources) for bits in step[count:]))
        sources[start : start + count] = carried


def _while(eqn: "core.JaxprEqn") -> tuple[int, ...]:
    """As a `scan`; how many turns there are decides about all that changes from turn to turn."""
    body = eqn.params["body_jaxpr"].jaxpr
    first = eqn.params["cond_nconsts"]
    start = eqn.params["body_nconsts"]
    step = reaches(body)
    turns = reaches(eqn.params["cond_jaxpr"].jaxpr)[0]
    unchanged = _unchanged(body, start)
    sources = [1 << i for i in range(len(eqn.invars))]
    while True:
        carry = sources[first + start :]
        turned = _through(turns, [*sources[:first], *carry])
        carried = [
            old if i in unchanged else old | turned | _through(step[i], sources[first:])
            for i, old in enumerate(carry)
        ]
        if carried == carry:
            return tuple(carried)
        sources[first + start :] = carried


def _unchanged(body: "core.Jaxpr", start: int) -> list[int]:
    """Which parts of its carry the body of a loop returns as they came."""
    carry = body.invars[start:]
    pairs = zip(carry, body.outvars, strict=False)
    return [i for i, (before, after) in enumerate(pairs) if before is after]


def _through(bits: int, sources: list[int]) -> int:
    """The union of the sources that the bits stand for."""
    return _union(source for i, source in enumerate(sources) if bits >> i & 1)


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)
