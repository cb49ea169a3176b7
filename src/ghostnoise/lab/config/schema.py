"""The settings of a run, section by section.

A section checks its own settings; `overrides.check` checks what concerns two sections. A setting that is added here
must have the default None, so that the identities of existing runs do not change.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticKnownError

from ghostnoise.lab.config import methods
from ghostnoise.lab.config.methods import Least0, Placement, Share

Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Settings that reject unknown names and cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    OWNERS: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {}
    """Settings that belong to some values of another setting: the name of that setting, and these values."""
    DEFAULTS: ClassVar[dict[str, dict[str, dict[str, object]]]] = {}
    """Defaults that belong to a value of another setting, by the name of that setting and its value."""

    @classmethod
    def fields(cls) -> dict[str, Any]:
        """Return the type of every setting."""
        return {name: field.annotation for name, field in cls.model_fields.items()}

    @classmethod
    def owners(cls) -> dict[str, tuple[str, tuple[str, ...]]]:
        """See `OWNERS`."""
        return cls.OWNERS

    @classmethod
    def defaults(cls) -> dict[str, dict[str, dict[str, object]]]:
        """See `DEFAULTS`."""
        return cls.DEFAULTS

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: object) -> object:
        """Fill in the defaults that belong to other settings, so that writing them makes no difference."""
        if not isinstance(given, dict):
            return given
        own: dict[str, object] = {}
        for choice, defaults in cls.defaults().items():
            chosen = given.get(choice, cls.model_fields[choice].default)
            own |= defaults.get(chosen, {}) if isinstance(chosen, str) else {}
        if not own:
            return given
        return own | {name: value for name, value in given.items() if value is not None or name not in own}

    @model_validator(mode="after")
    def _refuse_strays(self) -> Self:
        """Raise an error with a line for each setting that the chosen method, optimizer or data set does not have."""
        given = self.__dict__ | (self.__pydantic_extra__ or {})  # thousands of cells are checked; `getattr` is slow
        lines = [
            f"{name}={value!r}: a setting of {', '.join(owners)}, and {choice} is {given[choice]!r}; leave {name} out"
            for name, (choice, owners) in self.owners().items()
            if (value := given.get(name)) is not None and given[choice] not in owners and value != self._plain(name)
        ]
        if lines:
            raise ValueError("\n".join(lines))
        return self

    @classmethod
    def _plain(cls, name: str) -> object:
        """The default that does not depend on another setting."""
        return cls.model_fields[name].default if name in cls.model_fields else None


class ModelSettings(Section):
    """The network."""

    name: str
    """One of `ghostnoise.lab.models`, or "timm:NAME" for any of timm's."""
    width: Count | None = None
    """Channels of the first stage, or of the layers of a plain network; the network's own if unset."""
    widths: Annotated[list[Count], Field(min_length=1)] | None = None
    """Hidden layers of an MLP."""
    zero_init_last: bool | None = None
    """Initialize the gain of the last norm of each residual branch to 0 instead of 1, as timm does (false if unset)."""

    @field_validator("zero_init_last")
    @classmethod
    def _unset_default(cls, value: bool | None) -> bool | None:
        """Unset false, the default, so that writing it makes no difference."""
        return value or None


class NormSettings(Section):
    """How the network is normalized, and which noise is injected where.

    The options of the methods, such as `components`, are settings of this section too; see `methods.MethodInfo`.
    """

    model_config = ConfigDict(extra="allow")

    method: str
    """"bn", or "none" for the network's own normalization where that is not a batch norm; else a method's name."""
    ghost_size: Count | None = None
    """Samples in a ghost batch; without it, XBN uses the whole batch."""
    scope: Literal["local", "global"] = "local"
    """Whether statistics and draws use the samples of each process, or those of all processes."""
    placement: Placement | None = None
    """Noise between normalization and affine ("inside"), after the affine ("after"), before each activation
    ("activation"), or after the second normalization of each residual branch ("branch")."""
    eps: Above0 = 1e-5
    """Added to the variances of a batch norm."""
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Momentum of the running statistics."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method, with their defaults."""
        return dict(self.__pydantic_extra__ or {})

    @classmethod
    def fields(cls) -> dict[str, Any]:
        """Return the type of every setting, the methods' options included."""
        options = {option.name: option.annotation for info in methods.methods().values() for option in info.options}
        return super().fields() | options

    @classmethod
    @cache
    def owners(cls) -> dict[str, tuple[str, tuple[str, ...]]]:
        """See `Section.OWNERS`."""
        known = methods.methods().values()
        having = {
            "ghost_size": tuple(info.name for info in known if info.ghost_size != "none"),
            "scope": tuple(info.name for info in known if info.shares),
            "placement": tuple(info.name for info in known if info.placements),
            **{name: tuple(names) for name, names in methods.options().items()},
        }
        return {name: ("method", names) for name, names in having.items()}

    @classmethod
    @cache
    def defaults(cls) -> dict[str, dict[str, dict[str, object]]]:
        """See `Section.DEFAULTS`."""
        return {
            "method": {
                name: {option.name: option.default for option in info.options if option.default is not methods.REQUIRED}
                for name, info in methods.methods().items()
            }
        }

    @field_validator("method")
    @classmethod
    def _exists(cls, name: str) -> str:
        if name not in methods.methods():
            *most, last = map(repr, methods.methods())
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})
        return name

    @model_validator(mode="wrap")
    @classmethod
    def _check_options(cls, given: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Check the options against those of the method; their errors come with those of the other settings."""
        mistakes: list[InitErrorDetails] = []
        if isinstance(given, Mapping):
            given, mistakes = cls._read_options(given)
        try:
            made = handler(given)
        except ValidationError as error:
            mistakes = [*map(_again, error.errors(include_url=False)), *mistakes]
        if mistakes:
            raise ValidationError.from_exception_data(cls.__name__, mistakes)
        return made

    @classmethod
    def _read_options(cls, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[InitErrorDetails]]:
        """The settings with checked options, without those that are None; and a mistake for each that is wrong."""
        read, mistakes = dict(given), []
        method = given.get("method")
        info = methods.methods().get(method) if isinstance(method, str) else None
        types = {option.name: option.annotation for option in info.options} if info else {}
        fields = cls.model_fields  # not inside of the loop: this is slow, and thousands of cells are checked
        for name in [name for name in given if name not in fields]:
            if read[name] is None:
                del read[name]
            elif name not in methods.options():
                mistakes.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=read[name]))
            elif name in types:
                try:
                    read[name] = _adapter(str(method), name).validate_python(read[name], strict=True)
                except ValidationError as error:
                    mistakes += [_again(each, name) for each in error.errors(include_url=False)]
        return read, mistakes

    @model_validator(mode="after")
    def _require(self) -> Self:
        """Require the ghost size of methods that need one, and the options that have no default."""
        info = methods.methods()[self.method]
        needed = ["ghost_size"] if info.ghost_size == "required" else []
        needed += [option.name for option in info.options if option.default is methods.REQUIRED]
        for name in needed:
            if getattr(self, name, None) is None:
                raise ValueError(f"method={self.method!r} without {name}: it has no default; give one")
        return self


@cache
def _adapter(method: str, option: str) -> TypeAdapter[Any]:
    """Return the validator of an option of a method; making one takes far longer than using it."""
    return next(TypeAdapter(each.annotation) for each in methods.methods()[method].options if each.name == option)


def _again(mistake: ErrorDetails, *above: str) -> InitErrorDetails:
    """A mistake as it is raised again, at a place below `above`."""
    made = InitErrorDetails(type=mistake["type"], loc=(*above, *mistake["loc"]), input=mistake["input"])
    return made | {"ctx": mistake["ctx"]} if "ctx" in mistake else made


class DataSettings(Section):
    """The images and their augmentation."""

    name: Literal["mnist1d", "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder"]
    evaluate: Literal["validation", "test"] = "validation"
    """"validation" trains on 90 % of the training set and scores the rest; "test" trains on all of it.
    MNIST-1D has separate signals for validation, so both train on all of the training set."""
    limit: Count | None = None
    """Use only this many training images, the first in a fixed random order, before the validation split."""
    test_limit: Count | None = None
    """Use only this many test images, the first in a fixed random order."""
    split_seed: int | Literal["run"] = 0
    """Seed of the validation split: a number, so that all seeds are compared on the same images, or "run" for `seed`,
    so that each seed holds out other images."""
    augment: Literal["none", "flip-crop", "resized-crop"] = "none"
    """"flip-crop": random flip, zero padding, random crop; "resized-crop": random resized crop and flip."""
    padding: Annotated[int, Field(ge=0)] | None = None
    """Padding of "flip-crop" on each side (4 if unset)."""
    folder: str | None = None
    """Folder of "imagefolder" below the data folder, with train/ and val/ (or test/)."""
    image_size: Count | None = None
    """Size of the images of "imagefolder" as the network gets them (224 if unset)."""
    resize: Count | None = None
    """Shorter side of the images of "imagefolder" before the center crop for evaluation (256 if unset)."""
    stand_in: bool = False
    """Set by --smoke where the files are missing: use random images of the same shape."""

    OWNERS = {
        "padding": ("augment", ("flip-crop",)), "folder": ("name", ("imagefolder",)),
        "image_size": ("name", ("imagefolder",)), "resize": ("name", ("imagefolder",)),
        "split_seed": ("name", ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder")),
    }  # fmt: skip
    DEFAULTS = {
        "augment": {"flip-crop": {"padding": 4}}, "name": {"imagefolder": {"image_size": 224, "resize": 256}},
    }  # fmt: skip

    @field_validator("split_seed", mode="plain")
    @classmethod
    def _is_seed(cls, value: object) -> object:
        if value == "run" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise PydanticKnownError("literal_error", {"expected": "an integer of 0 or more, or 'run'"})

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.name == "imagefolder" and self.folder is None:
            raise ValueError("folder: missing, and name is 'imagefolder'; give the folder with train/ and val/")
        if self.augment not in augments(self.name):
            fitting = " or ".join(map(repr, augments(self.name)))
            raise ValueError(f"augment={self.augment!r} with name={self.name!r}: must be {fitting}")
        if self.image_size and self.resize and self.resize < self.image_size:
            raise ValueError(f"resize={self.resize}: must be image_size={self.image_size} or more; raise it")
        return self


def augments(name: str) -> tuple[str, ...]:
    """Return the augmentations that a data set can have."""
    if name == "mnist1d":
        return ("none",)
    return ("none", "resized-crop") if name == "imagefolder" else ("none", "flip-crop")


class OptimSettings(Section):
    """The optimizer and its learning rate, which warms up linearly and decays by a cosine, step by step.

    `warmup_lr`, `warmup_prefix` and `min_lr` have the names and the meaning of timm's.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Above0
    momentum: Share | None = None
    """Momentum of sgd (0.9 if unset)."""
    nesterov: bool | None = None
    """Nesterov momentum of sgd (false if unset)."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] | None = None
    """Betas of adamw (0.9, 0.999 if unset)."""
    eps: Above0 | None = None
    """Epsilon of adamw (1e-8 if unset)."""
    weight_decay: Least0 = 0.0
    """Weight decay of weights; parameters with fewer than two dimensions (gains, biases) are not decayed."""
    warmup_epochs: Least0 = 0.0
    """Epochs in which the learning rate rises."""
    warmup_lr: Least0 | None = None
    """Learning rate of the first step, below `lr`; if unset, step k of the K steps of warm-up has `lr` · k/K."""
    warmup_prefix: bool | None = None
    """Whether the cosine starts after the warm-up (true if unset); if false, it is counted from the first step, and the
    warm-up replaces its beginning."""
    min_lr: Least0 | None = None
    """Learning rate that the cosine ends at (0 if unset)."""
    clip: Above0 | None = None
    """Maximum norm of the gradient."""

    OWNERS = {
        "momentum": ("name", ("sgd",)), "nesterov": ("name", ("sgd",)),
        "betas": ("name", ("adamw",)), "eps": ("name", ("adamw",)),
    }  # fmt: skip
    DEFAULTS = {
        "name": {"sgd": {"momentum": 0.9, "nesterov": False}, "adamw": {"betas": (0.9, 0.999), "eps": 1e-8}},
    }  # fmt: skip

    @field_validator("warmup_prefix", "min_lr")
    @classmethod
    def _unset_default(cls, value: float | None, info: ValidationInfo) -> float | None:
        """Unset a value that is the default, so that writing it makes no difference."""
        return None if value == {"warmup_prefix": True, "min_lr": 0}[str(info.field_name)] else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError(
                f"nesterov with momentum={self.momentum}: it needs momentum above 0; raise momentum "
                "or leave nesterov out"
            )
        for name in ("warmup_lr", "min_lr"):
            if (value := getattr(self, name)) is not None and value >= self.lr:
                raise ValueError(f"{name}={value:g}: must be below lr={self.lr:g}; lower it or leave it out")
        for name in ("warmup_lr", "warmup_prefix"):
            if getattr(self, name) is not None and not self.warmup_epochs:
                raise ValueError(f"{name} with warmup_epochs=0: there is no warm-up; leave {name} out")
        return self


class TrainSettings(Section):
    """Length of the training, batch size, precision and device."""

    epochs: Count
    batch_size: Count
    """Samples in a step, over all processes."""
    accumulation_steps: Count | None = None
    """Micro-batches of equal size into which each process splits its part of a batch; the step uses the mean of their
    gradients (1 if unset). A batch norm uses the statistics of a micro-batch."""
    label_smoothing: Share = 0.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, updated every step and used for evaluation."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Mixed precision."""
    channels_last: bool = False
    compile: bool = False
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """"auto" for the best available one."""
    deterministic: bool = False
    """On GPUs, use only deterministic algorithms."""
    processes: Count = 1
    """Set by torchrun."""
    evaluate_every: Count | None = None
    """Epochs between two evaluations (1 if unset); the last epoch is always evaluated. It changes no result, and is
    not part of the identity of a run."""
    smoke: bool = False
    """Set by --smoke: the run is shrunk to seconds, and its numbers mean nothing."""

    @field_validator("accumulation_steps")
    @classmethod
    def _unset_default(cls, value: int | None) -> int | None:
        """Unset 1, the default, so that writing it makes no difference."""
        return None if value == 1 else value


class MeterSettings(Section):
    """How often the noise in the network's layers is measured; training is not affected."""

    every: Count
    """Epochs between two measurements; the first and the last epoch have one too."""
    batches: Count = 8
    """Training batches to measure."""
    ghost_size: Count | None = None
    """Samples in a ghost batch: `norm.ghost_size` if unset, or else 32."""
    draws: Count = 256
    """Ghost batches to draw from each batch."""


class Settings(Section):
    """All settings that determine what a run computes."""

    model: ModelSettings
    norm: NormSettings
    data: DataSettings
    optim: OptimSettings
    train: TrainSettings
    meter: MeterSettings | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
