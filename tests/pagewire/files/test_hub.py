"""Models of the Hub: the real client, and a server that answers like the Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.errors import ModelNotFoundError
from pagewire.files.hub import HubName, choose_gguf, hub_name
from pagewire.files.models import check_name, default_served_name, local_model, resolve_model
from tests.pagewire.tools.hub_server import hub

ORG = "me/tiny-GGUF"
FILES = {
    "README.md": b"words",
    "imatrix.gguf": b"statistics",
    "mmproj-tiny-Q4_K_M.gguf": b"images",
    "tiny-BF16/tiny-BF16-00001-of-00002.gguf": b"first half",
    "tiny-BF16/tiny-BF16-00002-of-00002.gguf": b"second half",
    "tiny-IQ4_NL.gguf": b"iq4",
    "tiny-Q4_K_M.gguf": b"q4",
    "tiny-Q8_0.gguf": b"q8",
}


@contextmanager
def served(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], revisions: tuple[str, ...] = ("main",)
) -> Iterator[None]:
    with hub(ORG, files, revisions) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached_files(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("models--*/snapshots/*/**/*") if path.is_file()}


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gguf", "name"),
    [
        ("me/it", None, HubName("me/it", None)),
        ("me/it", "Q8_0", HubName("me/it", "Q8_0")),
        ("me/it:Q8_0", None, HubName("me/it", "Q8_0")),
        ("me/it:Q8_0", "Q8_0", HubName("me/it", "Q8_0")),
        ("hf.co/me/it", None, HubName("me/it", "")),
        ("hf.co/me/it:latest", None, HubName("me/it", "")),
        ("https://huggingface.co/me/it:Q8_0", None, HubName("me/it", "Q8_0")),
        ("hf.co/me/it:folder/it-Q8_0.gguf", None, HubName("me/it", "folder/it-Q8_0.gguf")),
        ("me/it.gguf", None, None),
        ("/models/it", None, None),
        ("smollm", None, None),
        ("a/b/c", None, None),
    ],
)
def test_names(model: str, gguf: str | None, name: HubName | None) -> None:
    assert hub_name(model, gguf) == name


def test_a_name_and_the_flag_name_one_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="me/it:Q8_0: --gguf names another file"):
        check_name("me/it:Q8_0", gguf="Q4_0")
    with pytest.raises(ModelNotFoundError, match="only hub ids have several files"):
        check_name("smollm2-135m-instruct", gguf="Q4_0")
    assert default_served_name("hf.co/me/it:Q8_0") == "hf.co/me/it:Q8_0"


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", ["tiny-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny-Q8_0.gguf"]),
        ("q8_0", ["tiny-Q8_0.gguf"]),
        ("tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        ("IQ4_NL", ["tiny-IQ4_NL.gguf"]),
        ("BF16", [f"tiny-BF16/tiny-BF16-0000{part}-of-00002.gguf" for part in (1, 2)]),
        ("tiny-BF16-00001-of-00002.gguf", [f"tiny-BF16/tiny-BF16-0000{part}-of-00002.gguf" for part in (1, 2)]),
    ],
)
def test_one_file_is_chosen_of_several(wanted: str, chosen: list[str]) -> None:
    assert choose_gguf(FILES, wanted) == chosen


@pytest.mark.parametrize("wanted", ["F16", "Q4_K", "Q4_NL", "Q2_K", "mmproj", "none.gguf"])
def test_what_is_not_there_is_listed(wanted: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"no GGUF file '{wanted}'; it has BF16, IQ4_NL, Q4_K_M, Q8_0$"):
        choose_gguf(FILES, wanted)


def test_the_default_is_q4_k_m_then_q4_0_then_the_first() -> None:
    assert choose_gguf(["a-Q8_0.gguf", "a-Q4_0.gguf", "a-Q3_K_M.gguf"], "") == ["a-Q4_0.gguf"]
    assert choose_gguf(["a-Q8_0.gguf", "a-Q5_0.gguf", "mmproj-a.gguf"], "") == ["a-Q5_0.gguf"]
    with pytest.raises(ModelNotFoundError, match="has no GGUF file of a model"):
        choose_gguf(["mmproj-a-F16.gguf", "a.imatrix.gguf"], "")
    with pytest.raises(ModelNotFoundError, match=r"a-Q4_0-00002-of-00002\.gguf is missing"):
        choose_gguf(["a-Q4_0-00001-of-00002.gguf"], "Q4_0")


@given(st.lists(st.from_regex(r"[a-z]{1,3}-(Q4_0|Q8_0|BF16)\.gguf", fullmatch=True), min_size=1), st.data())
def test_the_order_of_the_list_does_not_matter(names: list[str], data: st.DataObject) -> None:
    [chosen] = choose_gguf(names, "")
    assert chosen in names and choose_gguf(data.draw(st.permutations(names)), "") == [chosen]


# -- downloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gguf", "content", "kept"),
    [
        (ORG, None, b"q4", {"tiny-Q4_K_M.gguf"}),
        (f"hf.co/{ORG}", None, b"q4", {"tiny-Q4_K_M.gguf"}),
        (f"{ORG}:Q8_0", None, b"q8", {"tiny-Q8_0.gguf"}),
        (ORG, "BF16", b"first half", {f"tiny-BF16-0000{part}-of-00002.gguf" for part in (1, 2)}),
    ],
)
def test_only_the_chosen_file_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, model: str, gguf: str | None, content: bytes, kept: set[str]
) -> None:
    with served(monkeypatch, FILES):
        path = resolve_model(model, gguf=gguf)
    assert path.read_bytes() == content and cached_files(cache) == kept
    assert local_model(model, gguf=gguf) == path
    assert resolve_model(str(path)) == path, "the link, beside the other parts"
    assert default_served_name(str(path)) == path.stem
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # what is cached is enough
    assert resolve_model(model, gguf=gguf) == path
    with pytest.raises(ModelNotFoundError, match="Check the name and the connection"):
        resolve_model(f"{ORG}:IQ4_NL")


def test_safetensors_come_first_unless_gguf_is_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = FILES | {"config.json": b"{}", "model.safetensors": b"weights"}
    with served(monkeypatch, both):
        path = resolve_model(ORG)
        assert path.is_dir() and cached_files(cache) == {"config.json", "model.safetensors"}
        assert resolve_model(f"hf.co/{ORG}").name == "tiny-Q4_K_M.gguf"
    assert local_model(ORG) == path and local_model(f"{ORG}:Q8_0") is None


def test_revisions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, FILES, ("main", "v2")):
        path = resolve_model(f"{ORG}:Q8_0", "v2")
        assert path.read_bytes() == b"q8" and local_model(f"{ORG}:Q8_0", revision="v2") == path
        with pytest.raises(ModelNotFoundError, match="RevisionNotFoundError"):
            resolve_model(f"{ORG}:Q8_0", "v3")


def test_unknown_and_private_repositories(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, FILES):
        with pytest.raises(ModelNotFoundError, match=r"RepositoryNotFoundError.*log in with `hf auth login`"):
            resolve_model("me/private:Q8_0")
        with pytest.raises(ModelNotFoundError, match=f"{ORG} has no GGUF file 'Q9'; it has BF16, IQ4_NL, Q4_K_M, Q8_0"):
            resolve_model(f"{ORG}:Q9")
    with served(monkeypatch, {"README.md": b""}), pytest.raises(ModelNotFoundError, match=r"neither config\.json nor"):
        resolve_model(ORG)


def test_progress_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    reports: list[tuple[str, int, int]] = []
    with served(monkeypatch, FILES | {"tiny-Q8_0.gguf": bytes(100_000)}):
        resolve_model(f"{ORG}:Q8_0", on_progress=lambda name, done, total: reports.append((name, done, total)))
    assert max(done for _, done, _ in reports) == 100_000
    assert "%|" not in capfd.readouterr().err
