"""What is remembered, and for how long: as long as what it was read off, as under `jax.jit`.

Of a function: traces and compiled programs, in its `home`. Nothing there holds the function, and
JAX's caches hold it weakly (`Weak`), so that it goes, with all that it closes over, when its owner
lets go of it; then its home goes, and with that JAX's own entries for the programs.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import jax

Owner = TypeVar("Owner")
P = ParamSpec("P")
T = TypeVar("T")


class Weak:
    """A function that is held weakly, and is called in its place.

    Equal to another if the functions are, by their own `==`, as `jax.jit` compares them; functions
    without a hash are told apart by identity. A bound method, which Python makes anew whenever it
    is named, lives as long as its object. What Python cannot refer to weakly is held.
    """

    def __init__(self, fn: Callable, gone: Callable[["Weak"], None] | None = None) -> None:
        callback = None if gone is None else lambda _: gone(self)
        try:
            refer = weakref.WeakMethod if isinstance(fn, types.MethodType) else weakref.ref
            self._get: Callable[[], Callable | None] = refer(fn, callback)
        except TypeError:
            self._get = lambda: fn
        self.by_identity = not has_hash(fn)
        self._hash = id(fn) if self.by_identity else hash(fn)

    @property
    def fn(self) -> Callable:
        """The function that is held."""
        fn = self._get()
        if fn is None:
            raise ReferenceError("the model or loss function is gone: nothing holds it any more")
        return fn

    def __call__(self, *args: object, **keywords: object) -> Any:
        return self.fn(*args, **keywords)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Weak):
            return self is other
        mine = self._get()
        other_fn = other._get()
        if mine is None or other_fn is None:
            return False
        return mine is other_fn if self.by_identity else bool(mine == other_fn)


class Home:
    """What is remembered of one function, and the one weak reference that stands for it."""

    def __init__(self, weak: Weak) -> None:
        self.weak = weak
        self.memo: dict[Hashable, Any] = {}


_HOMES: dict[Weak, Home] = {}


def home(fn: Callable) -> Home:
    """The home of a function, or of a `Weak` one."""
    found = _HOMES.get(fn if isinstance(fn, Weak) else Weak(fn))
    if found is None:
        weak = Weak(fn.fn if isinstance(fn, Weak) else fn, _leave)
        found = _HOMES.setdefault(weak, Home(weak))
    return found


def _leave(weak: Weak, homes: dict[Weak, Home] = _HOMES) -> None:
    homes.pop(weak, None)  # an argument: when Python ends, the module's names go first


class WeakInside:
    """A dataclass with a user's function somewhere inside, which compiled code must not keep."""

    def weakly(self) -> Self:
        """The same with the functions held weakly."""
        parts = {name: x for name, x in vars(self).items() if isinstance(x, WeakInside)}
        weak = {name: x.weakly() for name, x in parts.items()}
        if all(weak[name] is x for name, x in parts.items()):
            return self
        return dataclasses.replace(self, **weak)  # type: ignore[type-var]


def model_jit(step: Callable[..., T], static_argnums: tuple[int, ...] = ()) -> Callable[..., T]:
    """`jax.jit` of `step(owner, ...)`, whose programs live as long as the owner's model function.

    `owner` is a `Model` (static), or has one as `model` and comes `weakly`. What has none shares
    one `jax.jit`.
    """
    shared = jax.jit(step, static_argnums=static_argnums)

    @functools.wraps(step)
    def call(owner: Any, *args: object) -> T:
        model = getattr(owner, "model", None)
        if model is None:
            return cast(T, shared(owner, *args))
        memo = model.memo
        if step not in memo:
            memo[step] = jax.jit(_another(step), static_argnums=static_argnums)
        return cast(T, memo[step](owner.weakly(), *args))

    return call


def _another(step: Callable[..., T]) -> Callable[..., T]:
    """The same function as an object of its own: JAX keeps programs by the function."""

    @functools.wraps(step)
    def another(*args: object) -> T:
        return step(*args)

    return another


def kept(fn: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Remember the answers of `fn(owner, *args)` on the owner, an object that does not change.

    The key is the function and the arguments, which are positional and have a hash.
    """

    @functools.wraps(fn)
    def call(owner: Owner, *args: P.args, **none: P.kwargs) -> T:
        answers = vars(owner).setdefault("_answers", {})
        key = (fn, *args)
        if key not in answers:
            answers[key] = fn(owner, *args, **none)
        answer: T = answers[key]
        return answer

    return call


def has_hash(value: object) -> bool:
    """Whether a value can be looked up."""
    try:
        hash(value)
    except TypeError:  # arrays inside
        return False
    return True
