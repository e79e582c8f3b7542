"""Images of chats: what the prompt has of them, as transformers' processors; and what strangers send."""

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer, Idefics3Processor, LlavaProcessor

from pagewire.config import TokenizerConfig
from pagewire.config.values.tokenizer import image_limit, processor_options
from pagewire.errors import StartupError
from pagewire.services.tokenizer.images import images
from pagewire.services.tokenizer.images.image_processor import ImageError, decode
from pagewire.services.tokenizer.main import load_pool
from pagewire.services.tokenizer.prompts.prompts import encode_prompt
from pagewire.v1 import inference_pb2
from pagewire.wire.rpc import RpcError
from tests.makers.vision_checkpoints import (
    IMAGE_TOKENS,
    data_uri,
    encoded,
    image_processor,
    picture,
    save_vision_checkpoint,
)
from tests.services.tokenizer.tiny_tokenizers import save_byte_level
from tests.sweep import examples

MAX_PIXELS = 1_000_000


def chat(*contents: str) -> inference_pb2.TokenizeRequest:
    """One message of texts and data URIs."""
    parts = [
        inference_pb2.ContentPart(image=inference_pb2.ImageSource(url=content))
        if content.startswith(("data:", "http", "file:"))
        else inference_pb2.ContentPart(text=content)
        for content in contents
    ]
    message = inference_pb2.ChatMessage(role="user", parts=parts)
    return inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt(messages=[message]))


@pytest.fixture(scope="module", params=list(IMAGE_TOKENS))
def served(request, tmp_path_factory):
    """Family, directory, pool."""
    path = tmp_path_factory.mktemp(request.param)
    save_vision_checkpoint(path, request.param)
    pool = load_pool(TokenizerConfig(model=str(path), limit_mm_per_prompt="image=2", max_image_bytes=10_000))
    yield request.param, path, pool
    pool.close()


async def test_prompt_and_tensors_are_those_of_transformers(served):
    family, path, pool = served
    pictures = [picture(1), picture(2, 30, 90, "RGBA" if family == "llava" else "RGB").convert("RGB")]
    prompt = await encode_prompt(pool, chat("a", data_uri(pictures[0]), "b", data_uri(pictures[1]), "c"))
    again = await encode_prompt(pool, chat(data_uri(pictures[1]), data_uri(pictures[0])))
    token = IMAGE_TOKENS[family]
    tokenizer, processor = AutoTokenizer.from_pretrained(path), image_processor(family)
    shown = f"<|vision_start|>{token}<|vision_end|>" if family == "qwen2_5_vl" else token
    text = f"user: a{shown}b{shown}c\nassistant:"
    if family == "qwen2_5_vl":  # its own processor needs torchvision, for videos
        outputs = processor(pictures, return_tensors="np")
        for grid in outputs["image_grid_thw"]:
            text = text.replace(token, "X" * int(grid.prod() // 4), 1)
        token_ids = tokenizer(text.replace("X", token), add_special_tokens=False)["input_ids"]
    else:
        kwargs = (
            {"image_seq_len": 4}
            if family == "idefics3"
            else {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        )
        whole = (Idefics3Processor if family == "idefics3" else LlavaProcessor)(processor, tokenizer, **kwargs)
        outputs = whole(images=pictures, text=text, return_tensors="np", add_special_tokens=False)
        token_ids = outputs["input_ids"][0].tolist()
    assert list(prompt.token_ids) == token_ids
    axis = 1 if family == "idefics3" else 0
    for name in ("pixel_values", "image_grid_thw"):
        if name in outputs:
            sent = [np.frombuffer(i.tensors[name].data, i.tensors[name].dtype) for i in prompt.images]
            sent = [array.reshape(i.tensors[name].shape) for array, i in zip(sent, prompt.images, strict=True)]
            np.testing.assert_array_equal(np.concatenate(sent, axis), outputs[name])
    token_id = tokenizer.convert_tokens_to_ids(token)
    for image in prompt.images:
        place = slice(image.offset, image.offset + image.num_tokens)
        assert prompt.token_ids[place][0] == prompt.token_ids[place][-1] == token_id
    assert [image.hash for image in again.images] == [image.hash for image in reversed(prompt.images)]


async def test_what_cannot_be_read_is_refused_by_name(served):
    family, _, pool = served
    token = IMAGE_TOKENS[family]
    good = data_uri(picture(1))
    half = base64.b64encode(encoded(picture(1))[:900]).decode()
    cases = {
        "3 images; at most 2 are possible": chat(good, good, good),
        "image 2 of 2 cannot be read: it is damaged": chat(good, f"data:image/png;base64,{half}"),
        "file: URLs are not read": chat("file:///etc/passwd"),
        "http: and https: URLs are not fetched": chat("http://localhost/x.png"),
        "not valid base64": chat("data:image/png;base64,****"),
        "it is none of PNG": chat("data:text/plain,hello"),
        "it is empty": chat("data:image/png;base64,"),
        "more than 10000 bytes": chat("data:,%s" % ("a" * 10_001)),
        "no text may contain the placeholder": chat(f"this is an {token}", good),
    }
    for message, request in cases.items():
        with pytest.raises(RpcError, match=message) as caught:
            await encode_prompt(pool, request)
        assert caught.value.code.name == "INVALID_ARGUMENT"
        [(field, why)] = caught.value.violations
        assert why in caught.value.message
        expected = {"3 images; at most 2 are possible": "chat.messages", "no text may contain the placeholder": "chat"}
        assert field == expected[message] if message in expected else field.endswith(".image.url"), (message, field)
    assert len((await encode_prompt(pool, chat(good))).images) == 1


@pytest.mark.parametrize("served", ["llava"], indirect=True)
async def test_a_worker_that_died_is_replaced(served):
    _, _, pool = served
    [worker] = pool.images._workers
    killed = worker.pid
    os.kill(killed, signal.SIGKILL)
    good = data_uri(picture(1))
    assert len((await encode_prompt(pool, chat(good))).images) == 1
    assert worker.pid != killed
    # Another is started when it is busy.
    assert pool.images._idle.get_nowait() is worker
    assert len((await encode_prompt(pool, chat(good))).images) == 1
    assert len(pool.images._workers) == 2
    pool.images._idle.put(worker)


@pytest.mark.parametrize("served", ["llava"], indirect=True)
async def test_a_worker_that_does_not_come_to_an_end_is_ended(served, monkeypatch):
    _, _, pool = served
    good = data_uri(picture(1))
    await encode_prompt(pool, chat(good))
    workers = list(pool.images._workers)
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    stopped = {worker.pid for worker in workers}
    with monkeypatch.context() as patch:
        patch.setattr(images, "MAX_SECONDS", 0.2)
        with pytest.raises(RpcError, match=r"image 1 of 1 cannot be read: reading it takes more than 0\.2 seconds"):
            await encode_prompt(pool, chat(good))
    assert len((await encode_prompt(pool, chat(good))).images) == 1
    for pid in stopped & {worker.pid for worker in workers}:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("served", ["llava"], indirect=True)
async def test_a_template_of_strings_shows_the_placeholder(served, monkeypatch):
    family, _, pool = served
    monkeypatch.setattr(
        pool.codec, "chat_template", "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    prompt = await encode_prompt(pool, chat("a", data_uri(picture(1)), "b"))
    text = pool.codec.decode(prompt.token_ids, skip_special_tokens=False)
    assert text.startswith("a\n") and text.endswith("\nb") and IMAGE_TOKENS[family] in text


@pytest.mark.parametrize("served", ["llava"], indirect=True)
async def test_a_template_that_only_knows_parts_is_given_strings_as_such(served, monkeypatch):
    """A chat template like those of LLaVA and SmolVLM."""
    _, _, pool = served
    template = (
        "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}"
    )
    monkeypatch.setattr(pool.codec, "chat_template", template + "{% endfor %}{% endfor %}")
    message = inference_pb2.ChatMessage(role="user", content="hello")
    request = inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt(messages=[message]))
    prompt = await encode_prompt(pool, request)
    assert pool.codec.decode(prompt.token_ids, skip_special_tokens=False) == "hello"


async def test_a_model_without_images_refuses_them(tmp_path):
    save_byte_level(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    pool = load_pool(TokenizerConfig(model=str(tmp_path)))
    try:
        with pytest.raises(RpcError, match="this model reads no images"):
            await encode_prompt(pool, chat("a", data_uri(picture(1))))
    finally:
        pool.close()


@pytest.mark.parametrize("served", ["llava"], indirect=True)
async def test_images_are_fetched_at_once(served):
    """The server answers no request before it has received all."""
    _, path, _ = served
    images_of, all_asked, num_asked = {"/0": picture(1), "/1": picture(2)}, asyncio.Event(), 0

    async def handle(stream, writer):
        nonlocal num_asked
        head = await stream.readuntil(b"\r\n\r\n")
        num_asked += 1
        if num_asked == len(images_of):
            all_asked.set()
        await all_asked.wait()
        content = encoded(images_of[head.split()[1].decode()])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        writer.close()

    pool = load_pool(TokenizerConfig(model=str(path), allowed_media_domains="localhost"))
    try:
        async with await asyncio.start_server(handle, "localhost", 0) as server:
            urls = [f"http://localhost:{server.sockets[0].getsockname()[1]}{name}" for name in images_of]
            fetched = await encode_prompt(pool, chat(*urls))
        sent = await encode_prompt(pool, chat(*map(data_uri, images_of.values())))
        assert [image.hash for image in fetched.images] == [image.hash for image in sent.images]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"max_pixls": 4}', "'max_pixls' is not a setting of CLIPImageProcessor, which has .*crop_size"),
        ('{"size": "large"}', "Could not convert size input"),
        ('{"image_mean": [0.5]}', "mean must have 3 elements"),
        ('{"image_std": [0, 0, 0]}', "not finite"),
    ],
)
@pytest.mark.parametrize("served", ["llava"], indirect=True)
def test_settings_that_read_no_image_are_refused_at_start(served, options, message):
    _, path, _ = served
    with pytest.raises(StartupError, match=rf"image processor reads no image \(.*{message}.*--mm-processor-kwargs"):
        load_pool(TokenizerConfig(model=str(path), mm_processor_kwargs=options))


@pytest.mark.parametrize("served", ["llava"], indirect=True)
async def test_a_broken_image_processor_does_not_matter_without_images(served, tmp_path):
    _, path, _ = served
    shutil.copytree(path, tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{")
    with pytest.raises(StartupError, match="serve text alone with --limit-mm-per-prompt image=0"):
        load_pool(TokenizerConfig(model=str(tmp_path / "model")))
    pool = load_pool(TokenizerConfig(model=str(tmp_path / "model"), limit_mm_per_prompt="image=0"))
    try:
        assert (await encode_prompt(pool, chat("a"))).token_ids
        with pytest.raises(RpcError, match="images are switched off"):
            await encode_prompt(pool, chat("a", data_uri(picture(1))))
    finally:
        pool.close()


def test_images_that_a_separate_tokenizer_switches_off_are_logged(tmp_path, caplog):
    save_byte_level(tmp_path)
    load_pool(TokenizerConfig(model="owner/vision-model", tokenizer=str(tmp_path))).close()
    assert "images are switched off" in caplog.text and "--model" in caplog.text
    caplog.clear()
    (tmp_path / "model.gguf").touch()
    for model in (tmp_path / "model.gguf", tmp_path):
        load_pool(TokenizerConfig(model=str(model), tokenizer=str(tmp_path))).close()
    assert "images" not in caplog.text, "a model that is there and reads no images is no reason to warn"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: cannot be read as JSON"),
        ("[]", "config.json: expected a JSON object"),
        ('{"model_type": "llava"}', "key image_token_index must name the placeholder token of images, found None"),
        ('{"model_type": "llava", "image_token_index": 99999}', "names 99999 .* which the tokenizer does not have"),
    ],
)
def test_configs_that_name_no_placeholder(tmp_path, content, message):
    save_byte_level(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=message):
        load_pool(TokenizerConfig(model=str(tmp_path)))


def bomb(width: int, height: int) -> bytes:
    """A PNG that promises many pixels in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def scans(count: int) -> bytes:
    """A progressive JPEG with its last scan, and its table, repeated."""
    data = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    table = data.rindex(b"\xff\xc4")
    return data[:table] + data[table:-2] * count + data[-2:]


def animation() -> bytes:
    file = io.BytesIO()
    picture(1).save(file, "GIF", save_all=True, append_images=[picture(2)])
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bomb(60_000, 60_000), "60000 x 60000 pixels; 1000000 are possible"),
        (bomb(0, 10), "none of|damaged|0 x 10"),
        (bomb(100, 100), "damaged"),
        (encoded(picture(1))[:-200], "damaged"),
        (encoded(picture(1), "JPEG")[:-300], "damaged"),
        (encoded(picture(1, 3000, 2)), "200 times"),
        (scans(200), "more than 100 scans"),
        (animation(), "animated, with 2 frames"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
        (encoded(picture(1), "TIFF"), "none of PNG"),
        (b"", "empty"),
    ],
)
def test_hostile_images_are_refused(data, message):
    with pytest.raises(ImageError, match=message):
        decode(data, MAX_PIXELS)


@settings(max_examples=examples(150))
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8),
    st.floats(0, 1),
)
def test_whatever_is_sent_is_an_image_or_refused(format, changes, share):
    """Files with bytes changed and their end cut off."""
    data = bytearray(encoded(picture(1, 9, 7), format))
    for place, value in changes:
        data[int(place * len(data))] = value
    try:
        image = decode(bytes(data[: int(share * len(data)) or 1]), MAX_PIXELS)
    except ImageError as error:
        assert str(error)
    else:
        assert image.mode == "RGB" and image.width * image.height <= MAX_PIXELS


def test_images_of_all_kinds_become_upright_rgb():
    flat = Image.new("RGB", (8, 4), (200, 100, 50))
    for mode, format in (("CMYK", "JPEG"), ("P", "PNG"), ("L", "PNG"), ("1", "PNG"), ("RGBA", "WEBP"), ("LA", "PNG")):
        read = decode(encoded(flat.convert(mode), format), MAX_PIXELS)
        assert (read.mode, read.size) == ("RGB", (8, 4))
    # Sixteen bits of gray: the upper eight count.
    gray = Image.fromarray(np.full((4, 8), 128 * 256 + 7, dtype=np.uint16))
    assert decode(encoded(gray), MAX_PIXELS).getpixel((0, 0)) == (128, 128, 128)
    # What is transparent is white.
    clear = Image.new("RGBA", (8, 4), (0, 0, 0, 0))
    assert decode(encoded(clear), MAX_PIXELS).getpixel((0, 0)) == (255, 255, 255)
    # A camera that was held sideways.
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(flat, "JPEG", exif=exif), MAX_PIXELS).size == (4, 8)
    # What looks like scans, among what is said about the image and behind its end.
    exif[0x010E] = b"\xff\xda" * 200
    progressive = encoded(picture(1), "JPEG", progressive=True, exif=exif) + b"\xff\xda\x00\x02" * 200
    assert decode(progressive, MAX_PIXELS).size == (24, 40)
    assert decode(scans(50), MAX_PIXELS).size == (64, 64)


@pytest.mark.parametrize(("text", "limit"), [("image=4", 4), ('{"image": 7, "video": 0}', 7), ("image=0,audio=0", 0)])
def test_limits_are_written_in_both_forms(text, limit):
    assert image_limit(text) == limit


@pytest.mark.parametrize("text", ["4", "image", "image=x", "video=1", "image=1,video=2", "image=-1", "{", '["image"]'])
def test_wrong_limits_are_named(text):
    with pytest.raises(StartupError, match="--limit-mm-per-prompt"):
        image_limit(text)


def test_processor_options_are_an_object():
    assert processor_options('{"max_pixels": 1}') == {"max_pixels": 1}
    for text in ("[]", "{"):
        with pytest.raises(StartupError, match="--mm-processor-kwargs"):
            processor_options(text)
