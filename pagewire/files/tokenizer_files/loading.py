"""A tokenizer from a Hugging Face directory or a GGUF file, without importing transformers, and thus torch.

Importing transformers takes longer than the start of this service may take, and imports torch if it is installed. For a
directory with a `tokenizer.json`, transformers adds little to the Rust `tokenizers` library, and the same is done here:
special tokens and BOS/EOS rules of `tokenizer_config.json`, chat templates, and the clean-up of spaces for vocabularies
that are not BPE.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from pagewire.files.damaged_file import remedy
from pagewire.files.gguf import read_metadata
from pagewire.files.json_file import read_json_object
from pagewire.files.model_files import gguf_splits
from pagewire.files.tokenizer_files.conversion import convert
from pagewire.files.tokenizer_files.fill_in_middle import find_fill_in_middle
from pagewire.files.tokenizer_files.gguf_pre_tokenizers import UnknownPreTokenizerError
from pagewire.files.tokenizer_files.gguf_tokenizer import build_gguf_tokenizer
from pagewire.files.tokenizer_files.gguf_vocabulary import GgufTokenizerError
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerLoadError(ValueError):
    """Raised if the files have no usable tokenizer; the message names the file and the remedy."""


def load_tokenizer(path: str | Path) -> LoadedTokenizer:
    """Loads a .gguf file, or a directory with a tokenizer.json, one .gguf file or a vocabulary in another format.

    Raises TokenizerLoadError or GgufError; both are ValueErrors with file, cause and remedy.
    """
    path = Path(path)
    gguf_files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "tokenizer.json").exists() else []
    if gguf_files and gguf_files == gguf_splits(gguf_files[0]):
        path = gguf_files[0]
    if path.is_dir():
        backend, config = _read_directory(path)
    elif path.suffix == ".gguf":
        backend, config = _read_gguf(path)
    elif path.exists():
        raise TokenizerLoadError(f"{path} is neither a directory nor a .gguf file")
    else:
        raise TokenizerLoadError(f"{path} does not exist")
    return _finish(backend, config)


def _read_gguf(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    metadata = read_metadata(path)
    try:
        return build_gguf_tokenizer(metadata)
    except (GgufTokenizerError, UnknownPreTokenizerError) as error:
        raise TokenizerLoadError(f"{path}: {error}") from error


def _read_directory(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    # Older directories have the named tokens in a separate file, which tokenizer_config.json overrides.
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    templates = _directory_templates(path, config)
    file = path / "tokenizer.json"
    if not file.exists():
        backend, defaults = _convert(path, config)
        _add_by_id(backend, path / "added_tokens.json")
        _add_listed(backend, config, path / "tokenizer_config.json")
        return backend, {**defaults, **config, **templates}
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for any error in the file
        raise TokenizerLoadError(f"{file} cannot be read ({error}); {remedy(file)}") from error
    # As in transformers, tokenizer.json alone decides the positions of BOS and EOS, and these settings are ignored.
    config.pop("add_bos_token", None)
    config.pop("add_eos_token", None)
    return backend, {**config, **templates}


def _convert(path: Path, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns a tokenizer from a vocabulary in another format."""
    try:
        converted = convert(path, config)
    except ValueError as error:
        raise TokenizerLoadError(f"{error}; {_how_to_convert(path)}") from error
    if converted is None:
        raise TokenizerLoadError(
            f"{path} holds no tokenizer.json, nor files from which one can be made; {_how_to_convert(path)}"
        )
    return converted


def _how_to_convert(path: Path) -> str:
    return (
        f"write a tokenizer.json with transformers: AutoTokenizer.from_pretrained({str(path)!r})"
        f".save_pretrained({str(path)!r})"
    )


def _add_by_id(backend: Tokenizer, file: Path) -> None:
    """Adds the tokens of added_tokens.json (text -> id), which follow the vocabulary."""
    tokens = _read_json(file)
    if not all(isinstance(token_id, int) for token_id in tokens.values()):
        raise TokenizerLoadError(f"{file} must map each token to its id")
    by_id = sorted(tokens.items(), key=lambda item: item[1])
    backend.add_tokens([AddedToken(text, normalized=False) for text, _ in by_id])
    _check_ids(backend, by_id, file)


def _add_listed(backend: Tokenizer, config: dict[str, Any], file: Path) -> None:
    """Adds the tokens that tokenizer_config.json lists with ids."""
    listed = config.get("added_tokens_decoder") or {}
    _add_missing_tokens(backend, {"added_tokens_decoder": listed}, {})
    _check_ids(backend, ((_content(token), int(token_id)) for token_id, token in listed.items()), file)


def _check_ids(backend: Tokenizer, tokens: Iterable[tuple[str, int]], file: Path) -> None:
    """Checks the ids of added tokens, which the library assigns itself, in order."""
    for text, token_id in tokens:
        if (found := backend.token_to_id(text)) != token_id:
            raise TokenizerLoadError(
                f"{file} gives {text!r} the id {token_id}, but after this vocabulary it would have {found}; "
                + _how_to_convert(file.parent)
            )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return read_json_object(file)
    except ValueError as error:
        raise TokenizerLoadError(str(error)) from error


def _directory_templates(path: Path, config: dict[str, Any]) -> dict[str, str | None]:
    """Returns the template from chat_template.jinja, else from tokenizer_config.json ("default" of several), else from
    chat_template.json; and for chats with tools the one named "tool_use", which may be in additional_chat_templates/.
    """
    template = config.get("chat_template")
    named = {entry["name"]: entry["template"] for entry in template} if isinstance(template, list) else {}
    tool_use = _read_text(path / "additional_chat_templates" / "tool_use.jinja") or named.get("tool_use")
    default = _read_text(path / "chat_template.jinja") or (named.get("default") if named else template)
    default = default or _read_json(path / "chat_template.json").get("chat_template")
    return {"chat_template": default, "tool_chat_template": tool_use}


def _read_text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


def _finish(backend: Tokenizer, config: dict[str, Any]) -> LoadedTokenizer:
    backend.no_truncation()
    backend.no_padding()
    special_tokens = {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name)}
    _add_missing_tokens(backend, config, special_tokens)
    _set_post_processor(backend, config, special_tokens)
    is_bpe = type(backend.model).__name__ == "BPE"
    return LoadedTokenizer(
        backend=backend,
        special_tokens=special_tokens,
        chat_template=config.get("chat_template"),
        clean_up_spaces=bool(config.get("clean_up_tokenization_spaces")) and not is_bpe,
        tool_chat_template=config.get("tool_chat_template"),
        fill_in_middle=find_fill_in_middle(backend, config),
    )


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _added_token(token: str | dict[str, Any], *, special: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    return AddedToken(
        token["content"],
        single_word=token.get("single_word", False),
        lstrip=token.get("lstrip", False),
        rstrip=token.get("rstrip", False),
        normalized=token.get("normalized", True),
        special=special or token.get("special", False),
    )


def _add_missing_tokens(backend: Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Adds tokens that only tokenizer_config.json has: first those with ids, then the named and the extra special
    ones."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: list[AddedToken] = []
    by_id = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    candidates = [_added_token(token, special=token.get("special", False)) for _, token in by_id]
    candidates += [_added_token(config[name], special=True) for name in special_tokens]
    candidates += [_added_token(token, special=True) for token in extra]
    for token in candidates:
        if token.content not in known:
            known.add(token.content)
            missing.append(token)
    if missing:
        backend.add_tokens(missing)


def _set_post_processor(backend: Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Adds BOS before and EOS after the text if the configuration requires them."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = special_tokens.get("bos_token") if config.get("add_bos_token") else None
    eos = special_tokens.get("eos_token") if config.get("add_eos_token") else None
    single = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
    pair = [*single, *[f"{bos}:1"] * bool(bos), "$B:1", *[f"{eos}:1"] * bool(eos)]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
