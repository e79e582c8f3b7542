"""Which decode steps are captured; what is refused is in test_startup.py."""

from pagewire.services.executor.capture_sizes import capture_sizes, draft_sizes


def test_default_capture_sizes():
    assert capture_sizes(None, None, 10) == (1, 2, 4, 8, 10)
    assert capture_sizes(None, None, 1) == (1,)
    sizes = capture_sizes(None, None, 300)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24) and sizes[-6:] == (240, 248, 256, 272, 288, 300)
    assert capture_sizes(None, None, 4096)[-1] == 512
    assert capture_sizes(None, 1000, 4096)[-2:] == (992, 1000)
    assert capture_sizes(None, 24, 300) == (1, 2, 4, 8, 16, 24)


def test_capture_sizes_as_asked():
    assert capture_sizes((8, 1, 8, 3), None, 8) == capture_sizes((8, 1, 8, 3), 8, 8) == (1, 3, 8)


def test_tokens_with_drafts():
    assert draft_sizes((1, 2, 4, 8), 3, 8192) == (2, 4, 8, 16, 24, 32)
    assert draft_sizes((1,), 5, 8192) == (2, 4, 6)
    sizes = draft_sizes(capture_sizes(None, None, 256), 5, 8192)
    assert (sizes[0], sizes[-1], len(sizes)) == (2, 512, 50), "larger steps keep the device busy"
    assert draft_sizes((1, 2, 4, 8), 3, 20) == (2, 4, 8, 16, 20)
    assert draft_sizes((1, 2), 0, 8192) == draft_sizes((), 3, 8192) == ()
