"""Classes that users choose by name, and the options that each of them has."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from ._arguments import check_key, whole_number
from ._enums import check_names

T = TypeVar("T")
COUNTS = (int, int | None, "int", "int | None")  # annotations of whole numbers


class Registry(dict[str, type[T]], Generic[T]):
    """The classes that an argument takes by name. The options of a class are its fields."""

    def __init__(self, argument: str, base: type, classes: Mapping[str, type[T]]) -> None:
        super().__init__(classes)
        self.argument = argument
        self.base = base

    def register(self, name: str, cls: type[T]) -> None:
        """Give a class a name that is free."""
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            base = self.base.__name__
            raise TypeError(f"{base.lower()} must be a subclass of {base}; got {cls!r}")
        if name in self:
            raise ValueError(f"{self.argument} {name!r} exists already; choose another name")
        self[name] = cls

    def check(self, choice: object) -> None:
        """Refuse what is neither a name in here nor an object."""
        if isinstance(choice, str):
            check_names([choice], self, self.argument)
        elif isinstance(choice, type):
            name = choice.__name__
            raise TypeError(f"{self.argument} is the class {name}; pass {name}()")
        elif not isinstance(choice, self.base):
            raise TypeError(f"{self.argument} must be a name or an object; got {choice!r}")

    def make(self, choice: str | T, options: Mapping[str, object] | None = None) -> T:
        """The object that a name stands for, with those of the options that are its fields.

        An object is copied: attributes that are set later belong to later fits.
        """
        self.check(choice)
        if not isinstance(choice, str):
            return copy.copy(choice)
        return self[choice](**_own_options(self[choice], options or {}))

    def owners(self, option: str) -> str:
        """The names of the classes that have an option, in words."""
        names = [str(name) for name, cls in self.items() if option in _field_names(cls)]
        return f"{self.argument} {' or '.join(names)}" if names else ""


def check_options(
    options: Mapping[str, object], choices: Sequence[tuple[Registry, object]]
) -> None:
    """Refuse an option that no class has that was chosen by name, and say whose it is."""
    allowed: list[str] = []
    for registry, choice in choices:
        registry.check(choice)
        if isinstance(choice, str):
            allowed += _field_names(registry[choice])
    for name in options:
        owners = ", ".join(filter(None, [registry.owners(name) for registry, _ in choices]))
        if name not in allowed and owners:
            fit = " and ".join(f"{registry.argument} {choice}" for registry, choice in choices)
            raise ValueError(
                f"option {name!r} belongs to {owners}; this fit has {fit}. The options of an "
                "object go into its own constructor."
            )
    check_names(options, allowed, "option")


def _fields(cls: type) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def _field_names(cls: type) -> list[str]:
    return [field.name for field in _fields(cls)]


def _own_options(cls: type, options: Mapping[str, object]) -> dict[str, object]:
    """The options that are fields of a class, checked by what their fields say."""
    own = {}
    for field in _fields(cls):
        name = field.name
        if name in options:
            own[name] = _checked(field, options[name])
        elif field.default is field.default_factory is dataclasses.MISSING:
            example = "jax.random.key(0)" if name == "key" else "..."
            raise ValueError(f"{cls.__name__} needs {name!r}: pass {name}={example} to laplace")
    return own


def _checked(field: dataclasses.Field, value: object) -> object:
    if value is None:
        return None
    if field.name == "key":
        check_key(value)
    return whole_number(value, field.name) if field.type in COUNTS else value
