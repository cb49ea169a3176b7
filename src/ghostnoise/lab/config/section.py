"""The base of all sections of settings: strict, frozen, with kinds, and with the text that identifies them."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from ghostnoise.lab.config import own

Tree = dict[str, Any]
Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Least0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Settings that reject unknown names and cannot change.

    A section with a `TAG` is a tagged union: a class for each kind, with the settings of this kind. The base makes
    instances of its kinds, `OptimSettings(name="sgd", lr=0.1)` an `Sgd`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    TAG: ClassVar[str] = ""
    """The setting that selects the kind."""

    def __new__(cls, **given: Any) -> Self:
        """Create an instance of the kind that is given."""
        return super().__new__(cls._chosen(given) if given and "kinds" in vars(cls) else cls)

    @classmethod
    def kinds(cls) -> Mapping[str, type["Section"]]:
        """Return the kinds by the values of the tag; a section without a tag is its only kind."""
        return {}

    @classmethod
    def kind(cls, tag: object) -> type["Section"] | None:
        """Return the kind with this tag, None for the default; None if there is none."""
        field = cls.model_fields[cls.TAG]
        tag = field.default if tag is None and not field.is_required() else tag
        return cls.kinds().get(own.NAME if own.named(tag) else tag) if isinstance(tag, str) else None

    @classmethod
    def fields(cls) -> Tree:
        """Return the type of every setting of all kinds."""
        found = {name: field.annotation for name, field in cls.model_fields.items()}
        for kind in cls.kinds().values() if "kinds" in vars(cls) else ():
            found = {name: field.annotation for name, field in kind.model_fields.items()} | found
        return found

    @classmethod
    def owners(cls, name: str) -> list[str]:
        """Return the tags of the kinds that have a setting, which only these kinds have."""
        return [tag for tag, kind in cls.kinds().items() if kind.has(name)]

    @classmethod
    def has(cls, name: str) -> bool:
        """Return whether the kind has a setting; one that can only have a single value is a setting of other kinds."""
        kind = cls.model_fields[name].annotation if name in cls.model_fields else None
        return kind not in (None, type(None)) and (name == cls.TAG or len(get_args(kind)) != 1)

    @model_validator(mode="wrap")
    @classmethod
    def _as_kind(cls, given: object, handler: ModelWrapValidatorHandler[Self]) -> Any:
        """Validate as the kind that is given; what the kind does not have may be None."""
        if "kinds" not in vars(cls) or not isinstance(given, dict):
            return handler(given)
        kind = cls._chosen(given)
        own_fields = kind.model_fields
        return kind.model_validate({key: each for key, each in given.items() if each is not None or key in own_fields})

    @classmethod
    def _chosen(cls, given: Mapping[str, Any]) -> type[Any]:
        tag = given.get(cls.TAG)
        if found := cls.kind(tag):
            return found
        *most, last = map(repr, cls.kinds())
        kind = "literal_error" if isinstance(tag, str) else "missing" if tag is None else "string_type"
        context = {"expected": f"{', '.join(most)} or {last}"} if kind == "literal_error" else {}
        mistake = InitErrorDetails(type=kind, loc=(cls.TAG,), input=given if tag is None else tag, ctx=context)
        raise ValidationError.from_exception_data(cls.__name__, [mistake])

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, without the texts of this section."""
        made = super().model_copy(update=update, deep=deep)
        made.__dict__.pop("canonical", None)
        made.__dict__.pop("portable", None)
        return made

    def identifying(self) -> Tree:
        """Return the settings that identify a run: those that are set."""
        return self.model_dump(exclude_none=True)

    def of_any_machine(self) -> Tree:
        """Return the settings that identify a run wherever it is trained."""
        return self.identifying()

    @cached_property
    def canonical(self) -> str:
        """The settings that identify a run, as JSON."""
        return json_text(self.identifying())

    @cached_property
    def portable(self) -> str:
        """The settings that identify a run wherever it is trained, as JSON."""
        return json_text(self.of_any_machine())


def json_text(tree: Any) -> str:
    """Return a tree of settings as JSON with sorted keys and without spaces."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return text if "-0.0" not in text else json.dumps(_unsigned(tree), sort_keys=True, separators=(",", ":"))


def _unsigned(value: Any) -> Any:
    """Replace -0.0 by 0.0, which is the same setting."""
    if isinstance(value, dict):
        return {name: _unsigned(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_unsigned(each) for each in value]
    return value + 0.0 if isinstance(value, float) else value
