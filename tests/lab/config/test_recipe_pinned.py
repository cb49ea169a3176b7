"""The identities of the shipped recipes, which must not change: finished runs would be trained again."""

import hashlib

import pytest
from pydantic import create_model

from ghostnoise.lab.config import grid, methods, recipe
from ghostnoise.lab.config.overrides import SECTIONS, validated
from ghostnoise.methods import registry

# recipe -> its base settings, its smoke run, and all cells of its grid.
PINNED = {
    "cpu-mlp": ("843c1afccc75", "1d6a7eeef5c2", "edda1894a693"),
    "cpu-resnet": ("a7f58033077b", "5d288ffd913a", "a61f605a5e3a"),
    "cpu-resnet-augment": ("a7f58033077b", "5d288ffd913a", "a9a32bc996d0"),
    "cpu-resnet-c100": ("86837150573a", "a5544bb563fa", "175ad99b0fb8"),
    "cpu-resnet-c100-sizes": ("b7f8e16e200a", "273ea44fc054", "c42e6bffdb26"),
    "cpu-resnet-evalnorm": ("a7534f29b873", "e48c2c7626b7", "85d8f217b97a"),
    "demo": ("1f2ed71783c5", "bce1bdc683df", "9533d816cd78"),
    "digits": ("f51e59b9359a", "ab165be97745", ""),
    "fig1": ("1489b383e4ad", "e1512013ce5a", "fb4b86517623"),
    "fig3-agni": ("c780e3ba6284", "70e643657095", "0ebbb389badc"),
    "fig3-dropout": ("3cc7ed3dbd8c", "5a1ae2b1d71b", "396d2ee0db07"),
    "fig3-gbn": ("2316591e25a6", "0d7969fab524", "a23bf56d214a"),
    "fig3-gni": ("d94c259d8e8b", "1e1b1c3c86ba", "22235fd9cc4d"),
    "fig3-gni-parts": ("491e5413a3dc", "178912571d31", "efb0845fb687"),
    "fig3-xbn-en": ("b0bc154c642f", "b976ae1c3e68", "ae5f73c9aa94"),
    "fig4": ("806341b546a3", "e0058390f0dc", "b4701cadec12"),
    "fig5": ("0fbc84e81385", "717b1462c220", "d41e4ebf9737"),
    "fig6": ("ac61cac13269", "18d6db6f53de", "ac1bcf81f574"),
    "fig7": ("5919304259b4", "ebaf924f151c", "20bcd1d54ae8"),
    "mnist1d-adaptivity": ("cbb10aa06694", "e9caf8dd1876", "0dfdf44b67f8"),
    "mnist1d-equal-noise": ("e80bec179d4d", "af914871fc0a", "0f6fde91780a"),
    "mnist1d-equal-time": ("1f2ed71783c5", "bce1bdc683df", "5aba4cbc759e"),
    "mnist1d-evalnorm": ("f7bae907b2e2", "de3cc9070352", "0d5f0d03a0ac"),
    "mnist1d-evalnorm-table1": ("4ab18778525d", "340da98b1fdb", "771a4736ce79"),
    "mnist1d-fig3": ("b99f06f63b8c", "94d8edc16998", "7da67669137e"),
    "mnist1d-fig3-agni": ("e39918eb650a", "5ad05cb04609", "7af000c628a7"),
    "mnist1d-fig3-dropout": ("f6e76009cac3", "6ecc06d6c8e9", "64d85471a2a2"),
    "mnist1d-fig5": ("56a822b6f785", "402db0541791", "0e23518d41f4"),
    "mnist1d-fig7": ("d790540e2b63", "0f25a1fe0402", "af42dfe6b52d"),
    "mnist1d-gap": ("0b7cccb55987", "b5c4d6c53f12", "ecfb40398226"),
    "mnist1d-history": ("4c24ed30776c", "5bfc0b95f696", "a8fd067dd4b8"),
    "mnist1d-stable-xbn": ("30495e614fdd", "903d4654958f", "5a2e64ae2877"),
    "mnist1d-table1": ("1f2ed71783c5", "bce1bdc683df", "bf62e9fa8440"),
    "mnist1d-table3-convmixer": ("1fb4c1136c10", "09f54b0c24c0", "ddd682fd6b23"),
    "mnist1d-table3-nfresnet": ("bea1362d8c40", "cb3667655857", "238280fea385"),
    "mnist1d-table3-vit": ("636b8509edf0", "295ded68d662", "a3c971f8f43e"),
    "mnist1d-table4": ("4a6f2987ef9b", "d906f30a8780", "aeb89aa249bc"),
    "mnist1d-wsln": ("56a822b6f785", "402db0541791", "437daab17aec"),
    "resnet8-table2": ("569ef7a6c813", "a5c315ebcf67", "3fbdcb0fb6cd"),
    "table1": ("125325524434", "a6781a9d0773", "70aaec8b314e"),
    "table2-c10": ("86624e1c34aa", "a1ea2938d01f", "c0f80fd577e7"),
    "table2-i1k": ("80de7c3df608", "749f26ed04af", "ace6a7fdfa42"),
    "table3-convmixer": ("5cf1ea2545c2", "bf2504502e4c", "c92168c1e736"),
    "table3-nfresnet": ("100bdbd1e710", "d23086a024f3", "41f55c831f72"),
    "table3-vit": ("45bede0bae4e", "e92e9b89e3bb", "d81f8ce01550"),
    "table4": ("7c2b0d777d48", "a0388237ef6e", "4a4036c43463"),
}

# Settings of the first format that have a default. Any later one must be unset by default.
FIRST = {
    "norm": {"scope", "eps", "momentum"},
    "data": {"evaluate", "split_seed", "augment", "stand_in", "image_size", "resize"},
    "optim": {"name", "weight_decay", "warmup_epochs", "momentum", "nesterov", "betas", "eps"},
    "train": {
        "label_smoothing", "amp", "channels_last", "compile", "device", "deterministic", "processes", "smoke",
    },
    "meter": {"batches", "draws"},
}  # fmt: skip
OPTIONS = {option for kind in methods.methods().values() for option in kind.defaults}


def pins(name):
    """Return the identities of a recipe: of its base settings, its smoke run, and a digest of all cells."""
    made = recipe.load(name)
    identities = [recipe.identity(cell.settings) for cell in grid.load(name).cells()] if "grid" in made.plan else []
    cells = hashlib.sha256(" ".join(identities).encode()).hexdigest()[:12] if identities else ""
    return made.identity, recipe.load(name, smoke=True).identity, cells


def test_every_recipe_is_pinned():
    assert list(PINNED) == recipe.names()


@pytest.mark.parametrize("name", PINNED)
def test_identities_of_the_shipped_recipes(name):
    assert pins(name) == PINNED[name]


def test_settings_of_later_formats_are_unset_by_default():
    for name, section in SECTIONS.items():
        kinds = [section, *section.kinds().values()]
        fields = [item for kind in kinds for item in kind.model_fields.items()]
        written = {key for key, field in fields if not field.is_required() and field.default is not None} - OPTIONS
        assert written == FIRST.get(name, set()), f"{name}: give a new setting the default None"


@pytest.mark.parametrize("name", [*SECTIONS])
def test_a_new_setting_changes_no_identity_until_it_is_set(name):
    for recipe_name in ("fig6", "table1"):
        settings = recipe.load(recipe_name).settings
        section = getattr(settings, name)
        if section is None:
            continue
        grown = create_model("Grown", __base__=type(section), added=(int | None, None))
        given = section.model_dump(exclude_none=True)
        for value, same in ((None, True), (1, False)):
            changed = settings.model_copy(update={name: grown.model_validate(given | {"added": value})})
            assert (recipe.identity(changed) == recipe.identity(settings)) is same
            assert (recipe.key(changed) == recipe.key(settings)) is same


def test_a_new_option_of_a_method_changes_no_identity_until_it_is_set(described):
    settings = recipe.load("table1").settings
    known, identity = registry.specs()["gni"], recipe.identity(settings)
    added = registry.Option("added", float, 0.5)
    described(methods.kind("gni", known.ghost_size, [*known.options, added], placements=known.placements))
    tree = settings.model_dump(exclude_none=True)
    assert validated(tree).norm.options["added"] == 0.5
    assert recipe.identity(validated(tree)) == identity
    tree["norm"]["added"] = 1
    assert recipe.identity(validated(tree)) != identity


def test_defaults_of_options():
    """They are not part of an identity: raise the numerics number if one of them changes."""
    pinned = {
        "none": {}, "bn": {}, "eagn": {},
        "gbn": {"running_var_from": "ghost"},
        "xbn": {"min_std": 0.0, "clamp_output": None, "self_weight": 0.0},
        "en": {"alpha": None},
        "gni": {"components": "both", "noise_eps": 1e-3, "draw": "replacement", "normalizer": "batch", "history": 0},
        "agni": {"components": "both", "noise_eps": 1e-3, "law": "fc", "dof": "paper"},
        "dropout": {"distribution": "bernoulli", "per": "element", "p_sets": "variance"},
    }  # fmt: skip
    for name, defaults in pinned.items():
        given = {key: value for key, value in methods.methods()[name].defaults.items() if value is not ...}
        assert given == defaults


def test_defaults_of_options_are_left_out_of_the_canonical_form():
    plain, written = recipe.load("table1"), recipe.load("table1", ["norm.components=both", "norm.noise_eps=1e-3"])
    assert plain.settings == written.settings
    assert "components" not in plain.canonical()
    assert '"components":"shift"' in recipe.load("table1", ["norm.components=shift"]).canonical()
    assert '"normalizer":"exclusive"' in recipe.load("table1", ["norm.normalizer=exclusive"]).canonical()
