import pytest

from ghostnoise.engine.backends.native import library


def test_no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("GHOSTNOISE_NATIVE_FOLDER", str(tmp_path))
    assert "was not built; reinstall with a C++ compiler" in library.library.__wrapped__()


def test_a_file_that_is_no_library(monkeypatch, tmp_path):
    suffix = library.importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"_library{suffix}").write_text("nothing")
    monkeypatch.setenv("GHOSTNOISE_NATIVE_FOLDER", str(tmp_path))
    assert "does not load" in library.library.__wrapped__()


def test_an_unknown_dtype_is_refused():
    with pytest.raises(RuntimeError, match="the native pass follow was built without the dtype of code 9"):
        library.run("follow", 9, 0, 0, 0, 0, 0, 0, 0.1)


def test_threads_only_for_what_is_worth_them():
    assert library.threads(library.GRAIN - 1) == 1
    assert library.threads(library.GRAIN) == library.torch.get_num_threads()
