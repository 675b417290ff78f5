"""Where a model is found, and what is said when it is not there."""

from __future__ import annotations

import pytest

from ottserve.workers.models.source import DEFAULT_MODEL, find_source


def test_the_bundled_model_is_a_gguf_file_with_its_authors_sampling():
    source = find_source(DEFAULT_MODEL)
    assert source.gguf_file is not None and source.gguf_file.endswith(".gguf")
    assert (source.temperature, source.top_p) == (0.2, 0.9)


def test_local_files_and_folders(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.touch()
    assert (find_source(str(file)).location, find_source(str(file)).gguf_file) == (str(tmp_path), "tiny.gguf")
    (tmp_path / "config.json").touch()
    assert find_source(str(tmp_path)).name == tmp_path.name


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"model.path={tmp_path}: no config.json"):
        find_source(str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "gone.gguf"])
def test_a_local_path_that_is_not_there_is_named(path):
    with pytest.raises(ValueError, match="no such"):
        find_source(path)


def test_anything_else_is_a_hub_id():
    assert find_source("someone/some-model").location == "someone/some-model"
