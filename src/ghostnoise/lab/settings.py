"""The settings of a run, section by section. Every field has one meaning, and unused ones stay unset.

A section checks what it can see by itself; `recipe.py` checks what needs two sections.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Method = Literal["none", "bn", "gbn", "xbn", "en", "gni", "agni", "dropout", "eagn"]
Placement = Literal["inside", "after", "activation", "branch"]
CUTTING = ("gbn", "xbn", "en")  # methods that cut the batch into ghost batches: batch norms of their own
GHOSTLY = (*CUTTING, "gni", "agni")  # methods that have a ghost size
NOISES = ("gni", "agni", "dropout", "eagn")  # methods that inject noise, and so can stand outside of a batch norm
SHARING = ("bn", *GHOSTLY)  # methods with statistics that processes can share

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Least0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Settings that reject what they do not know, and cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    OWNERS: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {}
    """Settings that belong to some values of another one: that one's name, and these values."""
    DEFAULTS: ClassVar[dict[str, dict[str, dict[str, object]]]] = {}
    """Defaults that belong to a value of another one, by that one's name and this value."""

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, given: object) -> object:
        """Unset settings take the defaults of what is chosen, so that both ways to write them are one run."""
        if not isinstance(given, dict):
            return given
        own: dict[str, object] = {}
        for choice, defaults in cls.DEFAULTS.items():
            chosen = given.get(choice, cls.model_fields[choice].default)
            own |= next((each for value, each in defaults.items() if value == chosen), {})
        return own | {name: value for name, value in given.items() if value is not None or name not in own}

    @model_validator(mode="after")
    def _belong(self) -> Self:
        """Each stray setting is a line of the error."""
        lines = [
            f"{name}={getattr(self, name)!r}: a setting of {', '.join(owners)}, and {choice} is "
            f"{getattr(self, choice)!r}; leave {name} out"
            for name, (choice, owners) in self.OWNERS.items()
            if getattr(self, choice) not in owners and getattr(self, name) != type(self).model_fields[name].default
        ]
        if lines:
            raise ValueError("\n".join(lines))
        return self


class ModelSettings(Section):
    """Which network."""

    name: str
    """One of `ghostnoise.lab.models`, or "timm:NAME" for any of timm's."""
    width: Count | None = None
    """Channels of the first stage, or of a plain network's layers, if not the network's own."""
    widths: Annotated[list[Count], Field(min_length=1)] | None = None
    """Hidden layers of an MLP."""


class NormSettings(Section):
    """How it is normalized, and which noise is injected where."""

    method: Method
    """"bn", or "none" for the network's own normalization where that is no batch norm; else a method's short name."""
    ghost_size: Count | None = None
    """Samples in a ghost batch; XBN takes all others without."""
    scope: Literal["local", "global"] = "local"
    """Whether statistics and draws are of each process's samples, or of all processes'."""
    components: Literal["both", "shift", "scale"] | None = None
    """Which parts of ghost noise to inject (gni, agni)."""
    placement: Placement | None = None
    """Noise between normalization and affine ("inside"), after the affine ("after"), before each activation
    ("activation"), or at the end of each residual branch's second normalization ("branch")."""
    law: Literal["fc", "conv"] | None = None
    """The distribution of analytical noise (agni)."""
    dof: Literal["paper", "exact"] | None = None
    """Its degrees of freedom: N as in the paper, or N - 1 (agni)."""
    p: Share | None = None
    """The drop rate (dropout)."""
    distribution: Literal["bernoulli", "gaussian"] | None = None
    """What is multiplied by (dropout)."""
    per: Literal["element", "channel"] | None = None
    """What shares a draw (dropout)."""
    std: Least0 | None = None
    """Standard deviation of additive noise (eagn)."""
    eps: Above0 = 1e-5
    """Added to the variances of a batch norm."""
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Of the running buffers."""
    noise_eps: Least0 | None = None
    """Added to the variances whose ratio is the scale noise (gni, agni)."""

    OWNERS = {
        "ghost_size": ("method", GHOSTLY), "scope": ("method", SHARING), "placement": ("method", NOISES),
        "components": ("method", ("gni", "agni")), "noise_eps": ("method", ("gni", "agni")),
        "law": ("method", ("agni",)), "dof": ("method", ("agni",)), "std": ("method", ("eagn",)),
        "p": ("method", ("dropout",)), "distribution": ("method", ("dropout",)), "per": ("method", ("dropout",)),
    }  # fmt: skip
    DEFAULTS = {
        "method": {
            "gni": {"components": "both", "noise_eps": 1e-3},
            "agni": {"components": "both", "noise_eps": 1e-3, "law": "fc", "dof": "paper"},
            "dropout": {"distribution": "bernoulli", "per": "element"},
        }
    }

    @model_validator(mode="after")
    def _has_a_strength(self) -> Self:
        ghostly = dict.fromkeys(("gbn", "en", "gni", "agni"), "ghost_size")
        needed = {**ghostly, "dropout": "p", "eagn": "std"}.get(self.method)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"method={self.method!r} without {needed}: it has no default; give one")
        return self


class DataSettings(Section):
    """Which images, and what is done to them."""

    name: Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder"]
    evaluate: Literal["validation", "test"] = "validation"
    """"validation" trains on 90 % of the training set and scores the rest; "test" trains on all of it."""
    limit: Count | None = None
    """Use only the first so many training images, in a fixed random order, before the validation split."""
    test_limit: Count | None = None
    """Use only the first so many test images, in a fixed random order."""
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Chooses the validation images; the same for all seeds of a run, so that they are compared on the same ones."""
    augment: Literal["none", "flip-crop", "resized-crop"] = "none"
    """"flip-crop": random flip, zero padding, random crop; "resized-crop": random resized crop and flip."""
    padding: Annotated[int, Field(ge=0)] | None = None
    """Of "flip-crop", on each side (4 if unset)."""
    folder: str | None = None
    """Of "imagefolder": a folder with train/ and val/ (or test/), below the data folder."""
    image_size: Count | None = None
    """Of "imagefolder" (224 if unset): what the network sees."""
    resize: Count | None = None
    """Of "imagefolder" (256 if unset): the shorter side, before the centre is cropped for evaluation."""
    stand_in: bool = False
    """Set by --smoke where the files are missing: random images of the set's shape."""

    OWNERS = {
        "padding": ("augment", ("flip-crop",)), "folder": ("name", ("imagefolder",)),
        "image_size": ("name", ("imagefolder",)), "resize": ("name", ("imagefolder",)),
    }  # fmt: skip
    DEFAULTS = {
        "augment": {"flip-crop": {"padding": 4}}, "name": {"imagefolder": {"image_size": 224, "resize": 256}},
    }  # fmt: skip

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
    """The augmentations that fit a data set."""
    return ("none", "resized-crop") if name == "imagefolder" else ("none", "flip-crop")


class OptimSettings(Section):
    """The optimizer and its learning rate, which warms up linearly and decays by a cosine, step by step."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Above0
    momentum: Share | None = None
    """Of sgd (0.9 if unset)."""
    nesterov: bool | None = None
    """Of sgd (false if unset)."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] | None = None
    """Of adamw (0.9, 0.999 if unset)."""
    eps: Above0 | None = None
    """Of adamw (1e-8 if unset)."""
    weight_decay: Least0 = 0.0
    """Of weights; gains and biases, all parameters of one dimension or none, are not decayed."""
    warmup_epochs: Least0 = 0.0
    """How long the rate rises from 0."""
    clip: Above0 | None = None
    """The largest norm of the gradient."""

    OWNERS = {
        "momentum": ("name", ("sgd",)), "nesterov": ("name", ("sgd",)),
        "betas": ("name", ("adamw",)), "eps": ("name", ("adamw",)),
    }  # fmt: skip
    DEFAULTS = {
        "name": {"sgd": {"momentum": 0.9, "nesterov": False}, "adamw": {"betas": (0.9, 0.999), "eps": 1e-8}},
    }  # fmt: skip

    @model_validator(mode="after")
    def _moves(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError(f"nesterov with momentum={self.momentum}: it needs some; raise momentum or leave it out")
        return self


class TrainSettings(Section):
    """How long, in which batches, and on what."""

    epochs: Count
    batch_size: Count
    """Samples in a step, over all processes."""
    label_smoothing: Share = 0.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an average of the weights, taken after every step, which is then what is evaluated."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Mixed precision."""
    channels_last: bool = False
    compile: bool = False
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """"auto" for the best that is there."""
    deterministic: bool = False
    """On GPUs: only algorithms that give the same result every time."""
    processes: Count = 1
    """Set by torchrun."""
    smoke: bool = False
    """Set by --smoke: the run is shrunk to seconds, and its numbers mean nothing."""


class MeterSettings(Section):
    """How often the noise in the network's layers is measured; training goes on as if it were not."""

    every: Count
    """Epochs between two measurements; the first and the last epoch have one too."""
    batches: Count = 8
    """Training batches that are measured."""
    ghost_size: Count | None = None
    """Samples in a ghost batch: those of the norm if unset, or else 32."""
    draws: Count = 256
    """Ghost batches that are drawn from a batch."""


class Settings(Section):
    """All that decides what a run computes."""

    model: ModelSettings
    norm: NormSettings
    data: DataSettings
    optim: OptimSettings
    train: TrainSettings
    meter: MeterSettings | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
