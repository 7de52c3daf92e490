"""What the reader of the source for the reference pages cannot know by itself.

Doctests: docstrings here say `Example:`, or end in a bare doctest. Griffe knows `Examples:` alone,
and Markdown takes `>>>` for quotations in quotations. Decorators: `@pytree` makes a dataclass.
"""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^Example:$", re.MULTILINE)
BARE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*\s*)+", re.MULTILINE)


def with_examples(text: str) -> str:
    """The docstring with its doctests in a section of examples."""
    text = SECTION.sub("Examples:", text)
    return BARE.sub(lambda m: "Examples:\n" + re.sub(r"(?m)^(?=.)", "    ", m[0]), text)


class House(griffe.Extension):
    """Objects as they are visited, before docstrings are parsed and dataclasses completed."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        """Any module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples(obj.docstring.value)

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """A class, its members visited."""
        if any(str(decorator.value) == "pytree" for decorator in cls.decorators):
            dataclass = griffe.ExprName("dataclasses.dataclass")
            cls.decorators.append(griffe.Decorator(dataclass, lineno=None, endlineno=None))

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """`static()` marks a field; it is no default."""
        for member in cls.members.values():
            if member.is_attribute and str(member.value) == "static()":
                member.value = None
