"""Which decode steps are captured; what is refused is in test_startup.py."""

from pagewire.services.executor.capture_sizes import capture_sizes


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
